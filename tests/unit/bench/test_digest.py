"""The benchmark of the record digest measures what it says."""

from __future__ import annotations

import struct

import pytest

from kvoffload import native
from kvoffload.bench import digest
from kvoffload.bench.digest import DigestBenchmark


def test_one_line_per_record_size_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MEMORY_BYTES", 4 << 20)
    steps: list[str] = []
    results = list(DigestBenchmark().run(steps.append))
    assert [(result.params["record_bytes"], result.params["place"]) for result in results] == [
        (size, place) for place in ("memory", "cache") for size in (4096, 65536, 1048576)
    ]
    assert len(steps) == 6
    assert all(result.value > 0 and result.limit > 0 for result in results)
    assert [str(result.goal) for result in results if result.goal] == ["ratio at least 0.8"]


def test_totals_that_no_runs_have_are_refused() -> None:
    name = {"fingerprint": bytes(32), "group": 0, "shard": 0}
    largest = struct.pack("=QQ", 12, 1)
    assert native.finish_digests(largest, 8, block_hashes=bytes(32), **name)  # type: ignore[arg-type]
    for low, high in ((13, 1), (0, 2)):
        totals = largest + struct.pack("=QQ", low, high)
        with pytest.raises(ValueError, match=r"^total 1 is no sum of runs: it must be below 2\*\*64 \+ 13$"):
            native.finish_digests(totals, 8, block_hashes=bytes(64), **name)  # type: ignore[arg-type]
