"""A password in an address appears in no error, no output and no log line, whichever setting has the address."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvoffload.cli.below import choose_tiers
from kvoffload.cli.config import parse_assignments, show
from kvoffload.cli.fleet import plan_fleet
from kvoffload.cli.serve import choose_remote, find_group
from kvoffload.config.secrets import mask_secrets
from kvoffload.config.sources import TEST_VARIABLE, LoadedSettings, Settings, load_settings
from kvoffload.doctor.given import Given
from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.server.config import ServerConfig, read_server_config
from kvoffload.web.application import hide_secrets

SECRET = "s3cret-word"
WRITTEN = [
    f"redis://user:{SECRET}@host",
    f"redis://:{SECRET}@host:6379/0",
    f"valkey://user:{SECRET}@host:6379/0",
    f"valkey://user:{SECRET}@host:port",
    f"valkey://user:{SECRET}/more@host",
    f"valkey://user:[{SECRET}@host",
    f"valkey://user:{SECRET}@more@host",
    f"valkeys://host/0?password={SECRET}",
    f"https://user:{SECRET}@host",
    f"https://{SECRET}@host",
    f"https://host/path?token={SECRET}&more=1",
    f"http://user:{SECRET}@host/a b",
    f"s3://user:{SECRET}@bucket/prefix",
    f"mooncake://user:{SECRET}@host:1",
    f"tcp://user:{SECRET}@127.0.0.1:5555",
    f"etcd://user:{SECRET}@{'long.' * 20}host",
    f"redis://{'long' * 30}:{SECRET}@host",
    f"user:{SECRET}@host",
    f"/keys/redis://user:{SECRET}@host",
    f"/a,/b/redis://user:{SECRET}@host",
    f"10GiB redis://user:{SECRET}@host",
]
NAMES = sorted(Settings.model_fields)


def tell_all(fault: BaseException) -> str:
    """Everything that a log could have of a fault: its line, its context, its traceback with all causes."""
    context = fault.context if isinstance(fault, KVOffloadError) else {}
    causes = []
    cause: BaseException | None = fault
    while cause is not None:
        causes.append(f"{cause} {cause!r}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join((*causes, repr(context), *traceback.format_exception(fault)))


@pytest.fixture(autouse=True)
def tests_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_VARIABLE, "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/kvoffload/1")


def load_from_each_source(name: str, value: str, folder: Path) -> list[LoadedSettings | ConfigError]:
    """Sets one setting by each source in turn."""
    file = folder / "kvoffload.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    in_list = folder / "list.toml"
    in_list.write_text(f"{name} = [{json.dumps(value)}]\n")
    sources: list[dict[str, object]] = [
        {"flags": {name: value}},
        {"engine": {name: value}},
        {"engine": {name: {"address": value}}},
        {"environment": {f"KVOFFLOAD_{name.upper()}": value}},
        {"file": file},
        {"file": in_list},
    ]
    found: list[LoadedSettings | ConfigError] = []
    for source in sources:
        try:
            found.append(load_settings(**source))  # type: ignore[arg-type]
        except ConfigError as fault:
            found.append(fault)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_setting_shows_the_password_of_an_address(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    for value in WRITTEN:
        for one in load_from_each_source(name, value, tmp_path):
            if isinstance(one, ConfigError):
                told.append(tell_all(one))
                continue
            told.append(json.dumps(dict(hide_secrets(one))))
            told += plan_all(one.settings)
        for as_json in (False, True):
            with contextlib.suppress(ConfigError):
                show(assignments=[f"{name}={value}"], as_json=as_json)
        told.append(Given(assignments=(f"{name}={value}",)).command("serve"))
    printed = capsys.readouterr()
    assert told
    assert [line for line in (*told, printed.out, printed.err, caplog.text) if SECRET in line] == []


def plan_all(settings: Settings) -> list[str]:
    """Plans a server by these settings: what it is refused with, and what it says of its tiers."""
    told = []
    fleet: dict[str, object] = {"listen": "tcp://127.0.0.1:5555", "peer_listen": "tcp://127.0.0.1:5556"}
    stores: dict[str, object] = {"mooncake": "mooncake://127.0.0.1:1", "s3": "s3://bucket", "disk": "/a"}
    two = read_server_config(
        {"domains": [{"name": each, "memory": "64MiB"} for each in ("red", "blue")]}, origin="file x"
    )
    for more in ({}, fleet, stores, {"valkey": "valkey://host", "s3": "s3://bucket", "disk_size": 1 << 40}):
        changed = {key: value for key, value in more.items() if not getattr(settings, key)}
        tried = settings.model_copy(update=changed)
        for plan in (
            lambda tried=tried: plan_fleet(tried, ServerConfig()),
            lambda tried=tried: choose_remote(tried, ServerConfig()),
            lambda tried=tried: find_group(tried.socket_group),
            lambda tried=tried: choose_tiers(tried, two),
            lambda tried=tried: choose_tiers(tried, ServerConfig()),
        ):
            try:
                told.append(describe(plan()))
            except ConfigError as fault:
                told.append(tell_all(fault))
    return told


def describe(made: object) -> str:
    if isinstance(made, Mapping):
        return " ".join(f"{tier.place.describe()} {tier!r}" for tiers in made.values() for tier in tiers)
    return repr(made)


@pytest.mark.parametrize("value", WRITTEN)
def test_what_names_no_setting_is_told_without_it_too(value: str) -> None:
    for flags in (lambda: parse_assignments([value.partition("=")[0]]), lambda: load_settings(flags={value: 1})):
        with pytest.raises(ConfigError) as caught:
            flags()
        assert SECRET not in tell_all(caught.value)
    for table in ({"peers": [{"address": value, "key": "k" * 40}]}, {"clients": [{"key": value}]}, {value: 1}):
        with pytest.raises(ConfigError) as caught:
            read_server_config(table, origin="file x")
        assert SECRET not in tell_all(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "valkey_password_file",
        "valkey_key_file",
        "fleet_secret_file",
        "http_token_file",
        "s3_credentials_file",
        "seal_key_file",
    ],
)
def test_a_secret_in_place_of_the_file_that_has_it_is_not_shown(name: str) -> None:
    for source in ({"flags": {name: SECRET}}, {"engine": {name: SECRET}}):
        with pytest.raises(ConfigError, match=rf"setting '{name}' = \(hidden\) in .*no absolute path") as caught:
            load_settings(**source)  # type: ignore[arg-type]
        assert SECRET not in tell_all(caught.value)


def test_a_secret_key_in_place_of_its_file_is_not_shown() -> None:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    with pytest.raises(ConfigError, match=r"'key_file' = \(hidden\) in a flag: a key, and not a file") as caught:
        load_settings(flags={"key_file": key})
    assert key not in tell_all(caught.value)
    for path in ("server.key", "/keys/server.key", f"/{'k' * 39}", f"{'k' * 35}.key", f"./{'k' * 38}"):
        assert load_settings(flags={"key_file": path}).settings.key_file == path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:word@host:1/0", "redis://***@host:1/0"),
        ("redis://:w@o/rd@host", "redis://***@host"),
        ("user:word@host", "***@host"),
        ("http://host/x?token=word&a=1", "http://host/x?token=***&a=1"),
        ("valkey://host:6379/0", "valkey://host:6379/0"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("/run/kvoffload/user@1000/s", "/run/kvoffload/user@1000/s"),
        ("64GiB", "64GiB"),
    ],
)
def test_the_rest_of_an_address_is_shown(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown
