"""The benchmark of the disk tier measures what it says, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench import disk
from kvoffload.bench.disk import DiskBenchmark


def test_a_line_for_each_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk, "DATA_BYTES", 4 << 20)
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 2 << 20)
    # The latest records are in the newer half of the segments, none of which is given up.
    monkeypatch.setattr(disk, "SEGMENTS", 12)
    monkeypatch.setattr(disk, "time_file_load", lambda load: 1.0 if load.path.name == "limit" else 0.0)
    results = list(DiskBenchmark().run(lambda step: None))
    assert [(result.params["what"], result.params["record_bytes"]) for result in results] == [
        ("write", 1 << 20),
        ("read", 1 << 20),
        ("read", 64 << 10),
        ("read at random", 64 << 10),
        ("write amplification", 64 << 10),
        ("read, sealed", 1 << 20),
    ]
    assert [result.limit for result in results[:4]] == [4 << 20] * 4
    assert [str(result.goal) for result in results] == [
        "ratio at least 0.85",
        "ratio at least 0.85",
        "ratio at least 0.85",
        "ratio at least 0.75",
        "value at most 1.2",
        "ratio at least 0.85",
    ]
    assert results[4].value >= 1.0
    assert int(results[4].params["evicted_segments"]) > 12
    assert not list(tmp_path.iterdir())
