"""The benchmark of real engines is a program of the clone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench import engine
from kvoffload.bench.engine import EngineBenchmark
from tests.kit.bench.scripts import RESULT


def test_the_repository_has_it() -> None:
    assert engine.SCRIPT.exists()


def test_its_lines_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SCRIPT", tmp_path / "script.py")
    engine.SCRIPT.write_text(f"import json\nprint(json.dumps({RESULT.as_json()!r}))\n")
    steps: list[str] = []
    assert list(EngineBenchmark().run(steps.append)) == [RESULT]
    assert steps == ["starting engines", "ttft kvoffload 4096"]
