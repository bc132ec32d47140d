"""The three ways to move a plan between a GPU and the host, and the table that says which is taken. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import isqrt

from kvoffload.transfer.copy_engine import CopyDirection

NO_LIMIT = 2**64 - 1


class CopyWay(Enum):
    """The ways of copying, ordered by what they take from the model's own work: nothing, a short kernel, a kernel all
    the time."""

    BATCH = "batch"
    """One DMA a run, many in one call to the driver."""
    STAGED = "staged"
    """A kernel between pages and a buffer on the GPU, and one DMA between that and each piece of host memory."""
    MAPPED = "mapped"
    """A kernel between pages and host memory."""


HAS_TO_BE_FASTER_BY = {CopyWay.BATCH: 1.0, CopyWay.STAGED: 1.05, CopyWay.MAPPED: 1.3}
"""A way that takes more from the model is chosen only for a gain that is worth it."""


@dataclass(frozen=True, kw_only=True)
class WayRule:
    """Plans of up to `runs` runs of up to `run_bytes` on average; runs that touch on both sides are one."""

    direction: CopyDirection
    run_bytes: int
    runs: int
    way: CopyWay


WayTable = tuple[WayRule, ...]
"""The first rule that fits counts; batch if none does."""


@dataclass(frozen=True, kw_only=True)
class WayTiming:
    """How long a plan of `runs` runs of `run_bytes` took at best."""

    direction: CopyDirection
    run_bytes: int
    runs: int
    way: CopyWay
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.run_bytes * self.runs / self.seconds


def choose_ways(timings: Iterable[WayTiming]) -> WayTable:
    """A rule for each size and count that was timed. What was not lies with the nearest that was, by ratio."""
    timings = list(timings)
    table = []
    for direction in CopyDirection:
        sizes = _with_limits({timing.run_bytes for timing in timings if timing.direction is direction})
        for run_bytes, size_limit in sizes:
            cell = [t for t in timings if t.direction is direction and t.run_bytes == run_bytes]
            for runs, count_limit in _with_limits({timing.runs for timing in cell}):
                way = fastest([timing for timing in cell if timing.runs == runs]).way
                table.append(WayRule(direction=direction, run_bytes=size_limit, runs=count_limit, way=way))
    return tuple(table)


def fastest(timings: Sequence[WayTiming]) -> WayTiming:
    """Of one plan's ways, what they take from the model counted in."""
    return min(timings, key=lambda timing: timing.seconds * HAS_TO_BE_FASTER_BY[timing.way])


def _with_limits(numbers: set[int]) -> list[tuple[int, int]]:
    """Ascending, each with how far it reaches: half-way to the next, as ratios go; the last one to the end."""
    ordered = sorted(numbers)
    limits = [isqrt(low * high) for low, high in pairwise(ordered)] + [NO_LIMIT] * bool(ordered)
    return list(zip(ordered, limits, strict=True))
