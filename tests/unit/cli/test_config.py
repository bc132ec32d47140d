"""`kvoffload config show`: value and source of every setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli.config import parse_assignments
from kvoffload.config.sources import Settings, describe_settings
from kvoffload.errors import ConfigError
from tests.kit.cli.commands import run


def test_show_prints_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "kvoffload.toml"
    file.write_text('verify = "always"\n')
    done = run(
        "config", "show", "--config", str(file), "--engine-config", '{"memory": "64GiB"}', "--set", "copy_threads=2"
    )
    words = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines() if line[:1].isalpha()}
    assert done.returncode == 0
    assert words["verify"] == ["always", "file"]
    assert words["memory"] == ["64GiB", "engine"]
    assert words["copy_threads"] == ["2", "flag"]
    assert words["self_test"] == ["true", "default"]


def test_each_meaning_and_what_is_allowed_is_printed_and_what_is_changed_alone_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVOFFLOAD_COPY_THREADS", "3")
    printed = run("config", "show").stdout
    assert all(f"    {row.description} Allowed: {row.allowed}.\n" in printed for row in describe_settings())
    changed = run("config", "show", "--changed", "--set", "verify=always").stdout.splitlines()
    assert [line.split() for line in changed if line[0] != " "] == [
        ["verify", "always", "flag"],
        ["copy_threads", "3", "environment"],
    ]


def test_json_has_a_line_per_setting() -> None:
    rows = [json.loads(line) for line in run("config", "show", "--json").stdout.splitlines()]
    assert [row["name"] for row in rows] == [row.name for row in describe_settings()]
    assert all(row["value"] == getattr(Settings(), row["name"]) and row["source"] == "default" for row in rows)


def test_assignments() -> None:
    assert parse_assignments(["a = 1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(ConfigError, match="no '='"):
        parse_assignments(["a"])
