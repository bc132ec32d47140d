"""The rows about servers that fail are about servers that failed."""

from __future__ import annotations

import pytest

from benchmarks.parts import outage


def test_a_row_for_each_way_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENTRIES": 200, "CALLS": 20, "TRIES": 1, "PAUSES_S": (0.0,)}.items():
        monkeypatch.setattr(outage, name, value)
    rows = list(outage.OutageBenchmark().run(lambda step: None))
    assert [row.params["what"] for row in rows] == [
        "stopped server, first hit",
        "stopped server, hits once it is late",
        "stopped server, misses",
        "killed server, next call",
        "entries after a restart 0 s later",
    ]
    assert rows[-1].value == rows[-1].limit == 200
    assert all(row.limit > 0 and row.goal is not None for row in rows)
