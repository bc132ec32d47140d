"""Durations counted by bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

CALL_BOUNDS_S = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0)
"""Upper bounds of durations of calls; the native core uses the same."""
WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RESIDENCE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28800.0, 86400.0, 604800.0)
"""Upper bounds of the time that a block was in memory before it was evicted; the native core uses the same."""


class Histogram:
    """Belongs to one thread. A duration counts in the first bucket whose bound it does not pass, or in the last."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds
