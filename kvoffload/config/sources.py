"""Settings: where each value came from, and how it is written.

Sources in rising order: default, environment (such as KVOFFLOAD_MEMORY), file (TOML), engine (the engine's extra
config), flag. Settings are read here once, at the edge of a process; every other room is handed values.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BeforeValidator, ValidationError
from pydantic.config import JsonDict

from kvoffload.config.secrets import HIDDEN, mask_secrets
from kvoffload.config.settings import Settings
from kvoffload.config.types import (
    check_key_file_path,
    check_secret_file_path,
    read_duration,
    read_size,
    read_size_or_auto,
)
from kvoffload.errors import ConfigError
from kvoffload.units import MIB, format_duration, format_size

__all__ = [
    "SERVER_TABLES",
    "LoadedSettings",
    "SettingRow",
    "Settings",
    "Source",
    "describe_settings",
    "find_service_manager",
    "format_served",
    "format_shown",
    "format_value",
    "load_settings",
    "load_shared",
    "read_toml",
    "read_variables",
]


class Source(Enum):
    """Where a value came from; a later one wins."""

    DEFAULT = "default"
    ENVIRONMENT = "environment"
    FILE = "file"
    ENGINE = "engine"
    FLAG = "flag"


VARIABLE_PREFIX = "KVOFFLOAD_"
TEST_VARIABLE = "KVOFFLOAD_TESTS"
"""Environment variable that allows settings that are for tests alone. The tests read variables with longer names."""
OF_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Ends of the names of variables by which Kubernetes tells a pod's processes where each service is. A service may
have a name that begins with kvoffload."""
SERVER_VARIABLE = f"{VARIABLE_PREFIX}SERVER"
AUTO_SERVER = "auto"
ROOTS_SOCKET = "/run/kvoffload.sock"
SERVER_TABLES = ("domains", "clients", "operators", "peers")
"""Tables of the file that are no settings: `kvoffload serve` reads them."""


@dataclass(frozen=True)
class SettingRow:
    """One setting as the documentation and `config show` print it."""

    name: str
    default: str
    allowed: str
    description: str
    room: str


@dataclass(frozen=True)
class LoadedSettings:
    """The settings of this process and the source of each."""

    settings: Settings
    sources: Mapping[str, Source]


def describe_settings() -> tuple[SettingRow, ...]:
    """Every setting that users may set, in the order in which the documentation lists them."""
    return tuple(
        SettingRow(name, format_value(name, field.default), *_notes(name), room=str(_extra(name)["room"]))
        for name, field in Settings.model_fields.items()
        if not _extra(name)["is_for_tests"]
    )


def format_value(name: str, value: object) -> str:
    """A value as a user would write it, with any secret that it has: only for what reads it back."""
    writers: dict[Any, Callable[[Any], str]] = {
        read_size: format_size,
        read_size_or_auto: format_size,
        read_duration: format_duration,
    }
    for note in Settings.model_fields[name].metadata:
        if isinstance(note, BeforeValidator) and note.func in writers and not isinstance(value, str):
            return writers[note.func](value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_shown(name: str, value: object) -> str:
    """A value as it is printed: as a user would write it, without secrets."""
    return mask_secrets(format_value(name, value))


def format_served(settings: Settings) -> dict[str, str]:
    """Those that make one private server what it is, by name, as a user would write them."""
    names = [name for name in Settings.model_fields if _extra(name)["is_served"]]
    return {name: format_value(name, getattr(settings, name)) for name in names}


def load_settings(
    *,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
    file: Path | None = None,
    engine: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedSettings:
    """Merge the sources and check every value. Without `environment` it is this process's; `defaults` stand in place of
    the settings' own.

    Raises ConfigError with one line that names the setting, the value, the source and what is allowed.
    """
    environment = os.environ if environment is None else environment
    layers: list[tuple[Source, str, Mapping[str, object]]] = [(Source.DEFAULT, "the defaults", defaults or {})]
    layers += (
        (Source.ENVIRONMENT, f"the environment ({variable})", {name: value})
        for variable, name, value in _read_environment(environment)
    )
    if file is not None:
        found = {name: value for name, value in read_toml(file).items() if name not in SERVER_TABLES}
        layers.append((Source.FILE, f"file {file}", found))
    layers.append((Source.ENGINE, "the engine's extra config", engine or {}))
    layers.append((Source.FLAG, "a flag", flags or {}))

    merged: dict[str, object] = {}
    sources = dict.fromkeys(Settings.model_fields, Source.DEFAULT)
    for source, origin, values in layers:
        for name, value in values.items():
            _check_name(name, origin)
            _check_value(name, value, origin)
            merged[name] = value
            sources[name] = source
    if merged.get("server") == AUTO_SERVER:
        # Where `auto` is said and the environment names a socket, the commands of this user serve and look there.
        said = environment.get(SERVER_VARIABLE, "")
        if said not in ("", AUTO_SERVER):
            sources["server"] = Source.ENVIRONMENT
        merged["server"] = said if said not in ("", AUTO_SERVER) else _find_socket(environment)
    return LoadedSettings(Settings.model_validate(merged), sources)


def load_shared(file: Path | None, flags: Mapping[str, object]) -> LoadedSettings:
    """The settings of a command that is about a shared server: where nothing is said, `server` is auto."""
    loaded = load_settings(defaults={"server": AUTO_SERVER}, file=file, flags=flags)
    if not loaded.settings.server:
        raise ConfigError("setting 'server' is empty: a private server", remedy="leave it out, or say a socket")
    return loaded


def _find_socket(environment: Mapping[str, str]) -> str:
    if os.geteuid() == 0:
        return ROOTS_SOCKET
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return os.path.join(folder, os.path.basename(ROOTS_SOCKET))
    raise ConfigError(
        "setting 'server' is auto, but XDG_RUNTIME_DIR is not set", remedy="say a socket: --set server=PATH"
    )


def _read_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields variable, setting and value of each that is ours."""
    for variable, value in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable.startswith(TEST_VARIABLE):
            continue
        name = variable.removeprefix(VARIABLE_PREFIX)
        if name.isupper() and not OF_KUBERNETES.search(variable):
            yield variable, name.lower(), value


def _check_name(name: str, origin: str) -> None:
    if name in Settings.model_fields:
        return
    known = [row.name for row in describe_settings()]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
    name = mask_secrets(name)
    raise ConfigError(f"unknown setting {name!r} in {origin}", remedy=hint, setting=name, source=origin)


def _check_value(name: str, value: object, origin: str) -> None:
    checked, reason = _try_value(name, value)
    if checked is None:
        _refuse(name, value, origin, reason)
    if name == "memory" and isinstance(checked.memory, int) and checked.memory < 64 * MIB:
        _refuse(name, value, origin, "too small")
    is_default = getattr(checked, name) == Settings.model_fields[name].default
    if _extra(name)["is_for_tests"] and not is_default and not os.environ.get(TEST_VARIABLE):
        raise ConfigError(
            f"setting {name!r} in {origin} is for kvoffload's own tests",
            remedy="leave it out",
            setting=name,
            source=origin,
        )


def _try_value(name: str, value: object) -> tuple[Settings | None, str]:
    """Returns settings with this value, or None and why it is refused. The exception, which has the value in it, ends
    here: a traceback of what is raised afterwards does not show it."""
    try:
        return Settings.model_validate({name: value}), ""
    except ValidationError as fault:
        return None, fault.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")


def _refuse(name: str, value: object, origin: str, reason: str) -> NoReturn:
    written = repr(value)
    if _is_likely_secret(name, value):
        shown = HIDDEN
    else:
        shown = mask_secrets(written)
        if shown != written and re.search(r"['\"]", reason):
            reason = "not allowed here"  # a reason with quotation marks may quote a part of the secret
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    reason = reason[:1].lower() + reason[1:]
    message = f"setting {name!r} = {shown} in {origin}: {reason}"
    raise ConfigError(message, remedy=f"allowed is {_extra(name)['allowed']}", setting=name, value=shown, source=origin)


def _is_likely_secret(name: str, value: object) -> bool:
    """Returns whether a value that was refused could be what the file that the setting names should have in it."""
    checks = {getattr(note, "func", None) for note in Settings.model_fields[name].metadata}
    return (
        isinstance(value, str)
        and not value.startswith("/")
        and bool(checks & {check_secret_file_path, check_key_file_path})
    )


def read_variables(prefix: str) -> dict[str, str]:
    """Another program's settings, by name: what the environment tells it, and not where a pod's services are."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix) and not OF_KUBERNETES.search(name)
    }


def find_service_manager() -> str:
    """Where systemd wants to hear that a service of Type=notify is ready; empty: nowhere."""
    return os.environ.get("NOTIFY_SOCKET", "")


def read_toml(file: Path) -> Mapping[str, object]:
    """Reads a file. ConfigError: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as fault:
        reason = fault.strerror or type(fault).__name__
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except tomllib.TOMLDecodeError as fault:
        reason = f"not TOML: {fault}"
    raise ConfigError(
        f"cannot read settings from {file}: {reason}", remedy="give a readable TOML file", source=str(file)
    )


def _extra(name: str) -> JsonDict:
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def _notes(name: str) -> tuple[str, str]:
    return str(_extra(name)["allowed"]), Settings.model_fields[name].description or ""
