"""A limit that is too slow must not flatter a ratio."""

from __future__ import annotations

import pytest

from kvoffload.bench.limits import Limit, limit_copy, limit_read_runs, limit_sha256
from kvoffload.errors import BenchmarkError


@pytest.mark.parametrize("limit", [limit_copy(4096), limit_sha256(4096), limit_read_runs([(0, 4, 2), (8, 4, 2)])])
def test_a_limit_does_its_work_and_has_a_floor(limit: Limit) -> None:
    limit.call()
    assert limit.rate(limit.amount / limit.floor / 2) == pytest.approx(limit.floor * 2)
    with pytest.raises(BenchmarkError, match="below its floor"):
        limit.rate(limit.amount / limit.floor * 1.01)


def test_reading_runs_reads_them_all() -> None:
    assert limit_read_runs([(0, 4, 2), (8, 4, 3)]).call() == 5
