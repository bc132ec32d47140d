"""A limit that is too slow must not flatter a ratio."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload import native
from kvoffload.bench.limits import Limit, limit_copy_by_threads, limit_line_walk, limit_read
from kvoffload.errors import BenchmarkError


def make_pair(size_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    return np.random.default_rng(1).integers(1, 256, size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)


LIMITS: dict[str, Callable[[], Limit]] = {
    "read": lambda: limit_read(np.ones(512, np.uint64)),
    "walk": lambda: limit_line_walk(native.LineWalk(100), batches=2, hashes=10, amount=20),
}


@pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS)
def test_a_limit_does_its_work_and_has_a_floor(make: Callable[[], Limit]) -> None:
    check_floor(make())


def check_floor(limit: Limit) -> None:
    limit.call()
    assert limit.rate(limit.amount / limit.floor / 2) == pytest.approx(limit.floor * 2)
    with pytest.raises(BenchmarkError, match="below its floor"):
        limit.rate(limit.amount / limit.floor * 1.01)


def test_reading_reads_them_all() -> None:
    assert limit_read(np.array([1, 2, 4, 1 << 63], np.uint64)).call() == 7 + (1 << 63)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copying_by_threads_copies_every_byte(threads: int, streams: bool) -> None:
    source, target = make_pair(10_001)
    before = set(threading.enumerate())
    with limit_copy_by_threads(source, target, threads=threads, streams=streams) as limit:
        check_floor(limit)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
    assert np.array_equal(source, target)
