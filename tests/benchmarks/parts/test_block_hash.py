"""The benchmark of block hashing measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.parts import block_hash
from benchmarks.parts.block_hash import BlockHashBenchmark, limit_sha256
from kvoffload.errors import BenchmarkError


def test_one_line_per_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "PROMPT_TOKENS", 4096)
    steps: list[str] = []
    results = list(BlockHashBenchmark().run(steps.append))
    assert [result.params["block_size"] for result in results] == [16, 64, 256]
    assert len(steps) == 3
    assert all(result.value > 0 and result.limit > 0 for result in results)


def test_the_limit_has_a_floor() -> None:
    limit = limit_sha256(4096)
    limit.call()
    with pytest.raises(BenchmarkError, match="below its floor"):
        limit.rate(limit.amount / limit.floor * 1.01)
