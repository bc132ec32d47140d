"""`python -m benchmarks.parts` runs the benchmarks that are named."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.parts import block_hash
from benchmarks.parts.__main__ import main


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "PROMPT_TOKENS", 4096)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.parts", *arguments])
    return main()


def test_a_json_object_for_each_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "hash", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["block_size"]) for row in rows] == [("hash", 16), ("hash", 64), ("hash", 256)]


def test_a_table_otherwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "hash") == 0
    assert "block_size=256" in capsys.readouterr().out


def test_an_unknown_name_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "digest")
    assert "known are arena, hash, index, outage, pagemap, tiered, web" in capsys.readouterr().err
