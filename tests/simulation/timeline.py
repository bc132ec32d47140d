"""One virtual clock: what happens next, in the order of time, and what has happened."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
MAX_EVENTS = 200_000
"""Of one schedule, which has some thousand."""


class Timeline:
    """The one source of time and of chance in a schedule."""

    def __init__(self, seed: int, *, traces: bool = False) -> None:
        self.random = Random(seed)
        self.now_ns = 1_000 * SECOND_NS
        self.trace: list[str] | None = [] if traces else None
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._last = 0

    def at(self, when_ns: int, act: Callable[..., None], *arguments: Any) -> None:
        """Things of one moment happen in the order in which they were asked for."""
        self._last += 1
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), self._last, act, arguments))

    def after(self, wait_ns: float, act: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_ns + int(wait_ns), act, *arguments)

    def run_until(self, end_ns: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= end_ns:
            self.now_ns, _, act, arguments = heapq.heappop(heap)
            self.events += 1
            assert self.events < MAX_EVENTS, f"no end at {self.now_ns}: {act} {arguments}"
            act(*arguments)
        self.now_ns = end_ns

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between_ms(self, low: float, high: float) -> int:
        """A span of time, in nanoseconds; short ones are as likely as long ones of any magnitude."""
        return int(low * (high / low) ** self.random.random() * MILLISECOND_NS)

    def note(self, who: str, what: str, *arguments: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{(self.now_ns - 1_000 * SECOND_NS) / 1e6:10.3f} ms  {who:<12} {what % arguments}")
