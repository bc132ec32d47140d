"""A limit that is too slow must not flatter a ratio."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffload import native
from kvoffload.bench.limits import Limit, limit_copy, limit_line_walk, limit_read, limit_read_runs, limit_sha256
from kvoffload.errors import BenchmarkError

LIMITS: dict[str, Callable[[], Limit]] = {
    "copy": lambda: limit_copy(4096),
    "read": lambda: limit_read(np.ones(512, np.uint64)),
    "sha256": lambda: limit_sha256(4096),
    "runs": lambda: limit_read_runs([(0, 4, 2), (8, 4, 2)]),
    "walk": lambda: limit_line_walk(native.LineWalk(100), batches=2, hashes=10, amount=20),
}


@pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS)
def test_a_limit_does_its_work_and_has_a_floor(make: Callable[[], Limit]) -> None:
    limit = make()
    limit.call()
    assert limit.rate(limit.amount / limit.floor / 2) == pytest.approx(limit.floor * 2)
    with pytest.raises(BenchmarkError, match="below its floor"):
        limit.rate(limit.amount / limit.floor * 1.01)


def test_reading_runs_reads_them_all() -> None:
    assert limit_read_runs([(0, 4, 2), (8, 4, 3)]).call() == 5


def test_reading_reads_them_all() -> None:
    assert limit_read(np.array([1, 2, 4, 1 << 63], np.uint64)).call() == 7 + (1 << 63)
