"""Every setting: its type, default, bounds and meaning, and where a value came from.

Sources in rising order: default, file (TOML), engine (the engine's extra config), flag. Settings are read here once, at
the edge of a process; every other room is handed values.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
)
from pydantic.config import JsonDict

from kvoffload.errors import ConfigError
from kvoffload.tcp_address import TCP_FORM, parse_tcp_address
from kvoffload.units import GIB, MIB, SIZE_FORM, format_duration, format_size, parse_duration, parse_size


class Source(Enum):
    """Where a value came from; a later one wins."""

    DEFAULT = "default"
    FILE = "file"
    ENGINE = "engine"
    FLAG = "flag"


def _size_or_auto(value: Any) -> Any:
    return value if value == "auto" else _size(value)


def _size(value: Any) -> int:
    if not isinstance(value, str | int):
        raise ValueError("not a size")
    return parse_size(value)


def _duration(value: Any) -> float:
    return parse_duration(value)


def _socket_path(value: str) -> str:
    if len(value.encode()) > 107:
        raise ValueError("longer than the kernel takes")
    return value


def _folders(value: str) -> str:
    parts = split_folders(value)
    for part in parts:
        if not part.startswith("/") or not part.isprintable():
            raise ValueError(f"{part!r} is no absolute path")
    if len(set(parts)) < len(parts):
        raise ValueError("a folder is named twice")
    return value


def _tcp_address(value: str) -> str:
    return str(parse_tcp_address(value)) if value else value


def _switch(value: Any) -> Any:
    # A flag has only text to offer; a file and an engine have real booleans.
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _count(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


Size = Annotated[int, BeforeValidator(_size)]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
Duration = Annotated[float, BeforeValidator(_duration)]
Switch = Annotated[StrictBool, BeforeValidator(_switch)]
SocketPath = Annotated[str, AfterValidator(_socket_path)]
Folders = Annotated[str, AfterValidator(_folders)]
TcpEndpoint = Annotated[str, AfterValidator(_tcp_address)]
Count = Annotated[StrictInt, BeforeValidator(_count)]

SERVER_TABLES = ("domains", "clients", "operators")
"""Tables of the file that are no settings: `kvoffload serve` reads them."""


def _setting(default: Any, *, room: str, allowed: str, description: str, **bounds: Any) -> Any:
    extra: JsonDict = {"room": room, "allowed": allowed}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


class Settings(BaseModel):
    """All settings of one process. Frozen; made by `load_settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: SizeOrAuto = _setting(
        "auto",
        room="cli",
        allowed=f"auto, or {SIZE_FORM}, at least 64MiB",
        description="Host memory for cached blocks, all ranks together. auto is half of what is free, at most 16GiB.",
    )
    server: SocketPath = _setting(
        "",
        room="client",
        allowed="the path of a Unix socket of at most 107 bytes, or empty for a private server",
        description="Socket of a shared cache server. Empty starts a private server that ends with its engine.",
    )
    listen: TcpEndpoint = _setting(
        "",
        room="cli",
        allowed=f"{TCP_FORM}, or empty",
        description="Where `kvoffload serve` takes TCP connections, for observers. Beyond loopback it needs key_file. "
        "Empty: none.",
    )
    key_file: str = _setting(
        "",
        room="cli",
        allowed="the path of a secret key file of `kvoffload keys new`, or empty",
        description="Secret key of `kvoffload serve` for TCP connections; the file's [[clients]] say whose.",
    )
    linger: Duration = _setting(
        0.0,
        room="client",
        allowed="a duration from 0s to 24h",
        description="How long a private server stays when its last engine has ended; an engine that comes within that "
        "time finds its cache again.",
        ge=0.0,
        le=86400.0,
    )
    socket_mode: Literal["0600", "0660", "0666"] = _setting(
        "0600",
        room="cli",
        allowed="0600, 0660 or 0666, in quotes",
        description="Who may open the sockets of `kvoffload serve`: its own user, its group too, or everyone.",
    )
    socket_group: str = _setting(
        "",
        room="cli",
        allowed="the name or number of a group, or empty for the server's own",
        description="Group of the sockets of `kvoffload serve`.",
        max_length=32,
    )
    segment_size: Size = _setting(
        GIB,
        room="cache",
        allowed="a size from 64MiB to 64GiB",
        description="Size of one shared memory segment; memory is taken and handed over in whole segments.",
        ge=64 * MIB,
        le=64 * GIB,
    )
    disk: Folders = _setting(
        "",
        room="tiers",
        allowed="absolute paths of folders of this user alone (mode 0700), with commas between them, or empty",
        description="Folders below memory for blocks that memory loses, one on each device. Empty: none.",
    )
    disk_size: Size = _setting(
        0,
        room="tiers",
        allowed=f"{SIZE_FORM}; at least 1GiB where disk is set",
        description="What each folder's files may take together, at most.",
    )
    disk_write: Literal["write_through", "write_back", "second_use"] = _setting(
        "write_through",
        room="daemon",
        allowed="write_through, write_back or second_use",
        description="When blocks are written to disk: as soon as they are stored, when memory will need their room, or "
        "then and only if they were loaded since.",
    )
    disk_queue: Duration = _setting(
        2.0,
        room="daemon",
        allowed="a duration from 10ms to 60s",
        description="How far writes may lie behind, by the disk's measured speed; beyond it blocks are not written.",
        ge=0.01,
        le=60.0,
    )
    disk_daily: Size = _setting(
        0,
        room="tiers",
        allowed=f"{SIZE_FORM}; 0 for any",
        description="What each folder may be written in a day.",
    )
    promote_deadline: Duration = _setting(
        2.0,
        room="connector",
        allowed="a duration from 0s to 60s; 0 for not at all",
        description="How long a request waits for blocks that come up from disk; what has come by then is used.",
        ge=0.0,
        le=60.0,
    )
    save_policy: Literal["auto", "eager", "on_evict", "second_use"] = _setting(
        "auto",
        room="connector",
        allowed="auto, eager, on_evict or second_use",
        description="When a block is saved: as soon as it is full, when the engine is about to lose it, or when it is "
        "used a second time. auto is on_evict when memory is smaller than the engine's own cache, else eager.",
    )
    verify: Literal["tiers", "always"] = _setting(
        "tiers",
        room="cache",
        allowed="tiers or always",
        description="When a record's digest is checked: as its bytes cross a tier, or on every load as well.",
    )
    whole_prompts: Switch = _setting(
        False,
        room="connector",
        allowed="true or false",
        description="Restore a prompt to its end where all of it is cached, and compute one token, in models of full "
        "attention alone. Faster where blocks are long; logits may differ in the last bits from those of a local hit.",
    )
    self_test: Switch = _setting(
        True,
        room="kvspec",
        allowed="true or false",
        description="Save, scrub, load, compare a pattern in a free block of every group before the first request.",
    )
    acquire_deadline: Duration = _setting(
        0.05,
        room="client",
        allowed="a duration from 1ms to 60s",
        description="How long a request waits for the server's answer to a hit before it counts as a miss.",
        ge=0.001,
        le=60.0,
    )
    step_budget: Duration = _setting(
        0.001,
        room="client",
        allowed="a duration from 100us to 1s",
        description="Time that all our calls together may take of one step of the engine's scheduler.",
        ge=0.0001,
        le=1.0,
    )
    copy_threads: Count = _setting(
        0,
        room="transfer",
        allowed="a whole number from 0 to 256; 0 means one per two cores, at most 8",
        description="Threads of the host copy engine.",
        ge=0,
        le=256,
    )
    hash_seed: str = _setting(
        "",
        room="keys",
        allowed="text of at most 256 characters",
        description="Seed of our own block hashes, for engines that have none. Different seeds never share blocks.",
        max_length=256,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info",
        room="cli",
        allowed="debug, info, warning or error",
        description="The least severe log line that is written.",
    )


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


def split_folders(value: str) -> list[str]:
    """Of the setting `disk`."""
    return [part.strip().rstrip("/") for part in value.split(",") if part.strip()]


def describe_settings() -> tuple[SettingRow, ...]:
    """Every setting, in the order in which the documentation lists them."""
    return tuple(
        SettingRow(name, format_value(name, field.default), *_notes(name), room=_extra(name)["room"])
        for name, field in Settings.model_fields.items()
    )


def format_value(name: str, value: object) -> str:
    """A value as a user would write it."""
    writers: dict[Any, Callable[[Any], str]] = {
        _size: format_size,
        _size_or_auto: format_size,
        _duration: format_duration,
    }
    for note in Settings.model_fields[name].metadata:
        if isinstance(note, BeforeValidator) and note.func in writers and not isinstance(value, str):
            return writers[note.func](value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_settings(
    *, file: Path | None = None, engine: Mapping[str, object] | None = None, flags: Mapping[str, object] | None = None
) -> LoadedSettings:
    """Merge the sources and check every value.

    Raises ConfigError with one line that names the setting, the value, the source and what is allowed.
    """
    layers: list[tuple[Source, str, Mapping[str, object]]] = []
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
    return LoadedSettings(Settings.model_validate(merged), sources)


def _check_name(name: str, origin: str) -> None:
    if name in Settings.model_fields:
        return
    nearest = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(Settings.model_fields)}"
    raise ConfigError(f"unknown setting {name!r} in {origin}", remedy=hint, setting=name, source=origin)


def _check_value(name: str, value: object, origin: str) -> None:
    try:
        checked = Settings.model_validate({name: value})
    except ValidationError as fault:
        reason = fault.errors()[0]["msg"].removeprefix("Value error, ")
        _refuse(name, value, origin, reason)
    if name == "memory" and isinstance(checked.memory, int) and checked.memory < 64 * MIB:
        _refuse(name, value, origin, "too small")


def _refuse(name: str, value: object, origin: str, reason: str) -> NoReturn:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    reason = reason[:1].lower() + reason[1:]
    message = f"setting {name!r} = {shown} in {origin}: {reason}"
    raise ConfigError(message, remedy=f"allowed is {_extra(name)['allowed']}", setting=name, value=value, source=origin)


def read_toml(file: Path) -> Mapping[str, object]:
    """ConfigError: it cannot be read, or is not TOML."""
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


def _extra(name: str) -> dict[str, str]:
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return {key: str(value) for key, value in extra.items()}


def _notes(name: str) -> tuple[str, str]:
    return _extra(name)["allowed"], Settings.model_fields[name].description or ""
