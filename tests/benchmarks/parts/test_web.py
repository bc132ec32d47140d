"""Acquires with and without a reader of the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import web
from kvoffload.errors import BenchmarkError


def test_a_row_has_acquires_with_and_without_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "ROUND_S", 0.05)
    monkeypatch.setattr(web, "ROUNDS", 2)
    steps: list[str] = []
    [row] = web.WebBenchmark().run(steps.append)
    assert steps == ["acquires beside readers"]
    assert row.value > 0
    assert row.limit > 0
    assert row.params["reading_ms"] > 0  # type: ignore[operator]


def test_a_process_that_does_not_start_is_said() -> None:
    with pytest.raises(BenchmarkError, match="kvoffload web does not start"), web.serve_web(Path("x" * 300)):
        pass
