"""Every setting: sources in order, and one clear line for what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.config.sources import (
    TEST_VARIABLE,
    Settings,
    Source,
    describe_settings,
    format_value,
    load_settings,
    load_shared,
    read_variables,
)
from kvoffload.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvoffload.toml"
    path.write_text('memory = "8GiB"\nverify = "always"\nself_test = false\nstep_budget = "2ms"\n')
    return path


def test_later_sources_win(file: Path) -> None:
    loaded = load_settings(file=file, engine={"memory": "16GiB", "copy_threads": 3}, flags={"memory": "64GiB"})
    assert loaded.settings.memory == 64 << 30
    assert loaded.sources["memory"] is Source.FLAG
    assert loaded.settings.copy_threads == 3
    assert loaded.sources["copy_threads"] is Source.ENGINE
    assert loaded.settings.verify == "always"
    assert loaded.sources["verify"] is Source.FILE
    assert loaded.settings.save_policy == "auto"
    assert loaded.sources["save_policy"] is Source.DEFAULT


def test_the_environment_is_the_least_of_the_sources(file: Path) -> None:
    loaded = load_settings(
        environment={"KVOFFLOAD_MEMORY": "16GiB", "KVOFFLOAD_COPY_THREADS": "3", "HOME": "/"}, file=file
    )
    assert (loaded.settings.memory, loaded.sources["memory"]) == (8 << 30, Source.FILE)
    assert (loaded.settings.copy_threads, loaded.sources["copy_threads"]) == (3, Source.ENVIRONMENT)


def test_a_wrong_variable_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"'memroy' in the environment \(KVOFFLOAD_MEMROY\); did you mean 'memory'"):
        load_settings(environment={"KVOFFLOAD_MEMROY": "16GiB"})
    with pytest.raises(ConfigError, match=r"'memory' = '1 parsec' in the environment \(KVOFFLOAD_MEMORY\)"):
        load_settings(environment={"KVOFFLOAD_MEMORY": "1 parsec"})


def test_what_kubernetes_tells_of_services_and_tests_read_themselves_are_no_settings() -> None:
    addresses = {
        "KVOFFLOAD_SERVICE_HOST": "10.0.0.1",
        "KVOFFLOAD_WEB_SERVICE_PORT_HTTP": "9470",
        "KVOFFLOAD_PORT": "tcp://10.0.0.1:9470",
        "KVOFFLOAD_WEB_PORT_9470_TCP_ADDR": "10.0.0.1",
        "KVOFFLOAD_TESTS": "1",
        "KVOFFLOAD_TESTS_FUZZ_SECONDS": "9",
    }
    assert load_settings(environment=addresses).settings == Settings()


def test_auto_is_the_socket_that_the_environment_names() -> None:
    environment = {"KVOFFLOAD_SERVER": "/run/kvoffload/cache", "XDG_RUNTIME_DIR": "/run/kvoffload/1000"}
    for said in ({"engine": {"server": "auto"}}, {"flags": {"server": "auto"}}, {"defaults": {"server": "auto"}}):
        loaded = load_settings(environment=environment, **said)  # type: ignore[arg-type]
        assert (loaded.settings.server, loaded.sources["server"]) == ("/run/kvoffload/cache", Source.ENVIRONMENT)
    of_user = {**environment, "KVOFFLOAD_SERVER": "auto"}
    assert load_settings(environment=of_user).settings.server.endswith("/kvoffload.sock")


def test_auto_is_one_socket_for_root_and_one_for_each_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert load_shared(None, {}).settings.server == "/run/kvoffload.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="auto, but XDG_RUNTIME_DIR is not set; say a socket"):
        load_shared(None, {})
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/kvoffload/1000")
    assert load_shared(None, {}).settings.server == "/run/kvoffload/1000/kvoffload.sock"
    assert load_settings(engine={"server": "auto"}).settings.server == "/run/kvoffload/1000/kvoffload.sock"
    assert load_settings().settings.server == ""


def test_a_shared_server_is_not_without_a_socket() -> None:
    assert load_shared(None, {"server": "/a"}).settings.server == "/a"
    with pytest.raises(ConfigError, match="'server' is empty: a private server; leave it out, or say a socket"):
        load_shared(None, {"server": ""})


def test_a_flag_has_only_text_to_offer() -> None:
    settings = load_settings(flags={"self_test": "false", "copy_threads": "4", "acquire_deadline": "20ms"}).settings
    assert (settings.self_test, settings.copy_threads, settings.acquire_deadline) == (False, 4, 0.02)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory", "12 parsecs", "unit 'parsecs'"),
        ("segment_size", "1B", "greater than or equal to 67108864"),
        ("acquire_deadline", 5, "the unit is missing"),
        ("verify", "never", "'tiers' or 'always'"),
        ("server", "/" + "ü" * 60, "longer than the kernel takes"),
    ],
)
def test_a_wrong_value_gives_one_line_that_says_it_all(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags={name: value})
    line = str(caught.value)
    assert "\n" not in line
    assert f"'{name}'" in line
    assert repr(value) in line
    assert "in a flag" in line
    assert said in line
    assert "allowed is" in line


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("memroy", "'memory'"), ("verfy", "'verify'"), ("Server", "'server'"), ("zzz", "known are memory")],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(wrong: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_settings(engine={wrong: 1})


def test_a_wrong_value_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('verify = "never"\n')
    with pytest.raises(ConfigError, match=r"file .*bad\.toml"):
        load_settings(file=path)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"memory = ", "not TOML"), (b"\xff\xfe", "not UTF-8")]
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_settings(file=path)


def test_every_setting_says_what_it_is_for_and_what_is_allowed() -> None:
    for row in describe_settings():
        assert row.description.endswith(".")
        assert row.allowed
        assert format_value(row.name, getattr(Settings(), row.name)) == row.default


def test_printed_defaults_can_be_read_back() -> None:
    written = {row.name: row.default for row in describe_settings()}
    assert load_settings(flags=written).settings == Settings()


def test_a_setting_for_tests_is_refused_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEST_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="'sparse_memory' in a flag is for kvoffload's own tests"):
        load_settings(flags={"sparse_memory": "true"})
    with pytest.raises(ConfigError, match="unknown setting 'sparse_memry'") as unknown:
        load_settings(flags={"sparse_memry": "true"})
    assert "sparse_memory" not in str(unknown.value)
    assert "sparse_memory" not in {row.name for row in describe_settings()}
    monkeypatch.setenv(TEST_VARIABLE, "1")
    assert load_settings(flags={"sparse_memory": "true"}).settings.sparse_memory
    monkeypatch.delenv(TEST_VARIABLE)
    assert not load_settings(flags={"sparse_memory": "false"}).settings.sparse_memory


def test_another_programs_variables_are_read_and_not_where_services_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_B", "ENGINE_A", "OTHER", "ENGINE_SERVICE_HOST", "ENGINE_PORT_80_TCP_ADDR"):
        monkeypatch.setenv(name, name.lower())
    assert read_variables("ENGINE_") == {"ENGINE_A": "engine_a", "ENGINE_B": "engine_b"}
