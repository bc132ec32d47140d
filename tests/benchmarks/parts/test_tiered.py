"""The effect of a disk on an engine: two questions to real servers, with little data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import tiered


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "MEMORY_MIB": 64,
        "DISK_MIB": 512,
        "RECORDS": 2,
        "FILLING_SAVES": 1,
        "PAIRS": 7,
        "HIT_CALLS": 300,
        "HIT_ROUNDS": 2,
        "COLD_CHAINS": 24,
    }.items():
        monkeypatch.setattr(tiered, name, value)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    saves, hits = tiered.TieredBenchmark().run(said.append)
    assert len(said) == 2
    assert saves.params["what"] == "save, disk saturated"
    assert int(saves.params["written"]) > 0
    assert str(saves.goal) == "ratio at least 0.98"
    assert hits.params["what"] == "memory hit, p99, beside promotions"
    assert int(hits.params["promoted"]) > 0
    assert hits.limit > 0
    assert str(hits.goal) == "value at most 1"
