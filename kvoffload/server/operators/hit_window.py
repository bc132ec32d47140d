"""Adds up what a domain's prompts got in the last day, and what pools of other sizes would have hit meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvoffload.cache import MemoryCurve

LOOK_NS = 10 * 1_000_000_000
"""Nanoseconds between two looks at the curve. A pool is not filled often enough in that time for the curve to halve its
counts more than once."""
MARK_NS = 900 * 1_000_000_000
"""Nanoseconds between two moments whose sums are kept."""
MARKS = 96
"""Number of sums that are kept: those of a day."""
_HALVED = 0.75
"""Share of the blocks asked for below which the curve has halved its counts since the last look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HitSums:
    """Sums since the window's first look, or between two moments."""

    saved_us: int = 0
    hit_memory: int = 0
    """Tokens that memory had."""
    hit_lower: int = 0
    """Tokens that slower tiers had."""
    evicted: int = 0
    """Tokens that were computed because their blocks had been evicted."""
    asked_blocks: int = 0
    """Blocks asked for, as the curve counts them."""
    hit_blocks: tuple[int, ...] = ()
    """Blocks among these that pools of the curve's sizes would have hit."""

    def since(self, other: HitSums) -> HitSums:
        return HitSums(
            saved_us=self.saved_us - other.saved_us,
            hit_memory=self.hit_memory - other.hit_memory,
            hit_lower=self.hit_lower - other.hit_lower,
            evicted=self.evicted - other.evicted,
            asked_blocks=self.asked_blocks - other.asked_blocks,
            hit_blocks=tuple(one - before for one, before in zip(self.hit_blocks, other.hit_blocks, strict=True)),
        )


class HitWindow:
    """Sums of the last day of one domain, and at most a quarter of an hour more. A curve halves its counts now and
    then, so its sums are made of what was new at each look. When the curve begins again with another sample, so does
    the window. Belongs to the thread of the server's core."""

    def __init__(self) -> None:
        self._last = MemoryCurve()
        self._now_ns = 0
        self._sums = HitSums()
        self._marks: deque[tuple[int, HitSums]] = deque()

    def look(self, now_ns: int, curve: MemoryCurve, prompts: HitSums) -> None:
        """Adds what is new in the curve. `prompts` has the counts of prompts since the server began."""
        last, self._last, self._now_ns = self._last, curve, now_ns
        hits = tuple(point.hit_blocks for point in curve.points)
        if not self._marks or curve.one_in != last.one_in or len(hits) != len(last.points):
            self._sums = _join(prompts, 0, (0,) * len(hits))
            self._marks = deque([(now_ns, self._sums)])
            return
        kept = 0.5 if curve.asked_blocks < _HALVED * last.asked_blocks else 1.0
        new = (one - int(kept * point.hit_blocks) for one, point in zip(hits, last.points, strict=True))
        self._sums = _join(
            prompts,
            self._sums.asked_blocks + max(curve.asked_blocks - int(kept * last.asked_blocks), 0),
            tuple(known + more for known, more in zip(self._sums.hit_blocks, new, strict=True)),
        )
        if now_ns - self._marks[-1][0] >= MARK_NS:
            self._marks.append((now_ns, self._sums))
        while len(self._marks) > MARKS + 1:
            self._marks.popleft()

    @property
    def span_s(self) -> int:
        """Seconds from the window's beginning to the last look."""
        return (self._now_ns - self._marks[0][0]) // 1_000_000_000 if self._marks else 0

    @property
    def sums(self) -> HitSums:
        """Sums of the window."""
        return self._sums.since(self._marks[0][1]) if self._marks else HitSums()


def _join(prompts: HitSums, asked_blocks: int, hit_blocks: tuple[int, ...]) -> HitSums:
    return HitSums(
        saved_us=prompts.saved_us,
        hit_memory=prompts.hit_memory,
        hit_lower=prompts.hit_lower,
        evicted=prompts.evicted,
        asked_blocks=asked_blocks,
        hit_blocks=hit_blocks,
    )
