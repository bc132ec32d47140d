"""Limits of this machine, with which every measured value is compared.

Each limit is the plainest code that does the unavoidable work, and has a floor: below it the limit itself is broken
(a debug build, a throttled machine), and a ratio over it would flatter us, so the benchmark refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import BenchmarkError


@dataclass(frozen=True)
class Limit:
    """One call does `amount` of `unit`; `floor` is the slowest rate per second that is believed."""

    name: str
    call: Callable[[], object]
    amount: float
    unit: str
    floor: float

    def rate(self, seconds: float) -> float:
        """The rate at this time per call. Raises BenchmarkError below the floor."""
        rate = self.amount / seconds
        if rate < self.floor:
            raise BenchmarkError(
                f"the limit {self.name!r} measured {rate:.3g} {self.unit}/s, below its floor of {self.floor:.3g}",
                remedy="run on an idle machine; a slow limit would flatter the ratio",
            )
        return rate


@contextmanager
def limit_copy_by_threads(
    source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], *, threads: int, streams: bool
) -> Iterator[Limit]:
    """One copy between two buffers in one piece per thread; with `streams` by stores that go around the caches.

    The threads, and their hold on the buffers, end with the block.
    """
    ends = np.linspace(0, source.nbytes, threads + 1).astype(int).tolist()
    pieces = [(target[begin:end], source[begin:end]) for begin, end in pairwise(ends)]
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            for copied in [pool.submit(native.copy_bytes, *piece, streams) for piece in pieces]:
                copied.result()

        yield Limit("streamed copy" if streams else "memcpy", copy, source.nbytes, "B", 1e8)


def limit_read(data: npt.NDArray[np.uint64]) -> Limit:
    """One pass over a buffer by this machine's widest loads, which combines the words and keeps nothing."""
    return Limit("read", lambda: native.read_bytes(data.data), data.nbytes, "B", 1e9)


def limit_line_walk(walk: native.LineWalk, *, batches: int, hashes: int, amount: int, counts_up: bool = False) -> Limit:
    """Two cache lines a hash, at random, the second named in the first, asked for in advance as a look-up does.

    With `counts_up` the second one is written to, as by a lease.
    """
    return Limit("line walk", lambda: walk.walk(batches, hashes, counts_up), amount, "items", 1e7)
