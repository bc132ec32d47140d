"""The benchmark of shared memory measures what it says."""

from __future__ import annotations

import pytest

from kvoffload.bench import shm
from kvoffload.bench.shm import ShmBenchmark


def test_a_line_for_each_direction_and_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RECORD_BYTES": 4096, "RECORDS": 4, "PAIRS": 7, "MEMORY_MIB": 64}.items():
        monkeypatch.setattr(shm, name, value)
    rows = list(ShmBenchmark().run(lambda step: None))
    assert [(row.params["what"], row.params["at_once"], str(row.goal)) for row in rows] == [
        ("save", 1, "value at least 5e+09"),
        ("load", 1, "value at least 5e+09"),
        ("save", 4, "ratio at least 0.85"),
        ("load", 4, "ratio at least 0.85"),
    ]
    assert all(row.value > 0 and row.limit > 0 for row in rows)
