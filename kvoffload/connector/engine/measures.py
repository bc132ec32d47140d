"""The measurements of this process since vLLM last asked for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.connector.engine.stats import ConnectorStats

HAND_OVER_S = 1.0
"""Minimum number of seconds between two hand-overs to a busy engine, which asks after each step."""

_Series = tuple[str, tuple[tuple[str, str], ...]]


class Measures:
    """Owned by the thread that records. Names and labels are those of the catalogue, and are checked when taken."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._counts: dict[_Series, float] = {}
        self._seconds: list[tuple[str, float]] = []
        self._gauges: dict[_Series, float] = {}
        self._told: dict[_Series, float] = {}
        self.not_before_s = 0.0

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        if amount:
            series = name, tuple(labels.items())
            self._counts[series] = self._counts.get(series, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Put one observation into a histogram."""
        self._seconds.append((name, value))

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._gauges[name, tuple(labels.items())] = value

    @property
    def is_due(self) -> bool:
        """Whether `HAND_OVER_S` has passed since the last hand-over."""
        return self.clock() >= self.not_before_s

    def take(self) -> ConnectorStats | None:
        """Returns the measurements since the last call; None: there are none."""
        self.not_before_s = self.clock() + HAND_OVER_S
        if not (self._counts or self._seconds or self._gauges != self._told):
            return None
        stats = ConnectorStats()
        for (name, labels), amount in self._counts.items():
            stats.count(name, amount, **dict(labels))
        for name, value in self._seconds:
            stats.observe(name, value)
        for (name, labels), value in self._gauges.items():
            stats.set(name, value, **dict(labels))
        self._counts, self._seconds, self._told = {}, [], dict(self._gauges)
        return stats
