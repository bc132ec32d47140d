"""Finds the seconds of prefill, and the money, that more and less memory would have brought. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.client.insight import ServerInsight
from kvoffload.top.ledger_rows import HOUR_S, NO_PRICES, Prices
from kvoffload.units import GIB, MIB

MEMORIES = (0.5, 0.75, 1.25, 1.5, 2.0)
"""The memories that are told, as multiples of the server's."""
LEAST_S = 60
"""Seconds of a window that tells something."""
_SURE = 2.0
"""Number of standard deviations within which a figure holds: in 19 of 20 cases."""
_APART = 0.0025
"""Standard deviation of a difference of hits, as a share of the blocks asked for, if every block is followed: an
eviction policy learns otherwise in a pool of another size. Measured with benchmarks/memory_curve.py."""
_UNITS = ((HOUR_S, "hour"), (60, "minute"), (1, "second"))


@dataclass(frozen=True, kw_only=True)
class SizeWorth:
    """The worth of a pool with another amount of memory, compared with the pool that there was."""

    memory: float
    """Memory as a multiple of the pool's."""
    added_bytes: int
    """Its memory less the pool's; negative if it has less."""
    saved_s: float
    """Seconds of prefill that it would have saved more than the pool; negative if it would have saved less."""
    error_s: float
    """Seconds by which that may be wrong, in 19 of 20 cases."""
    price: float | None = None
    """Price of these seconds, less that of the added memory. None: prefill has no price."""
    price_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryWorth:
    """The worth of other amounts of memory in a window of time."""

    span_s: float
    """Length of the window in seconds. It ends now."""
    sizes: tuple[SizeWorth, ...] = ()
    unknown: str = ""
    """Why nothing can be told; empty if it can."""
    has_prices: bool = False
    """Whether both prefill and memory have a price."""

    @property
    def wanted_bytes(self) -> int | None:
        """Returns the change of memory that would have brought the most money, even if the figures were wrong by as
        much as they may be. 0: no other size surely pays. None: it is not known, or there are no prices."""
        if not self.has_prices or not self.sizes:
            return None
        sure = [((size.price or 0.0) - size.price_error, size.added_bytes) for size in self.sizes]
        best, added_bytes = max(sure)
        return added_bytes if best > 0 else 0

    def describe(self) -> dict[str, Any]:
        """Returns plain values, and a sentence for each size."""
        return {
            "span_s": self.span_s,
            "unknown": self.unknown,
            "wanted_bytes": self.wanted_bytes,
            "sizes": [_round(vars(one)) | {"sentence": tell(one, self.span_s)} for one in self.sizes],
        }


def _round(values: Mapping[str, Any]) -> dict[str, Any]:
    # A sum with 0 makes no negative zero of a small loss.
    return {name: round(value, 3) + 0.0 if isinstance(value, float) else value for name, value in values.items()}


def find_worth(stats: CacheStats, insight: ServerInsight, prices: Prices = NO_PRICES) -> MemoryWorth:
    """Finds what the sizes of MEMORIES would have brought in the server's window."""
    window = insight.window
    unknown = _find_fault(stats, insight)
    if unknown:
        return MemoryWorth(span_s=window.span_s, unknown=unknown)
    hits, hit_tokens = window.hit_blocks, window.hit_memory + window.hit_lower
    # Slower tiers spare prefill, too, which more memory would not spare again.
    block_s = window.saved_s * window.hit_memory / hit_tokens / hits[1.0]
    computed = 1.0 if not window.hit_lower else window.evicted / (window.evicted + window.hit_lower)
    sizes = []
    for memory in (one for one in MEMORIES if min(hits) <= one <= max(hits)):
        found, error = read_curve(hits, memory)
        added = (found - hits[1.0]) if memory > 1 else (hits[1.0] - found)
        added, error = max(added, 0.0), error + _sampling_error(stats, insight, max(added, 0.0))
        # Of these blocks slower tiers would have had a part: at least none, at most as large a part as they had.
        likely = (1 + computed) / 2
        saved_s = added * likely * block_s
        error_s = (error * likely + added * (1 - computed) / 2) * block_s
        added_bytes = round((memory - 1) * stats.capacity_bytes)
        saved_s = saved_s if memory > 1 else 0.0 - saved_s
        size = SizeWorth(memory=memory, added_bytes=added_bytes, saved_s=saved_s, error_s=error_s)
        sizes.append(_price(size, window.span_s, prices) if prices.computing else size)
    return MemoryWorth(span_s=window.span_s, sizes=tuple(sizes), has_prices=prices.computing > 0 and prices.memory > 0)


def _find_fault(stats: CacheStats, insight: ServerInsight) -> str:
    """Returns why nothing can be told; empty if it can."""
    window = insight.window
    if window.span_s < LEAST_S:
        return "not known in the first minute"
    if window.has_other_groups:
        return "not known for models with windows or recurrent states"
    if not window.asked_blocks:
        return "nothing was asked for in the window"
    if stats.ready_bytes < stats.capacity_bytes:
        return "not known while the pool is smaller than its full size"
    if not (window.hit_blocks.get(1.0) and window.hit_memory and window.saved_s):
        return "no hit in memory has shown how long prefill takes"
    return ""


def _price(size: SizeWorth, span_s: float, prices: Prices) -> SizeWorth:
    hour_price = prices.computing / HOUR_S
    cost = size.added_bytes / GIB * span_s / HOUR_S * prices.memory
    return replace(size, price=size.saved_s * hour_price - cost, price_error=size.error_s * hour_price)


def _sampling_error(stats: CacheStats, insight: ServerInsight, added: float) -> float:
    """Returns by how many blocks a difference of hits may be wrong, mostly because one block in `one_in` is followed.

    Each block is followed or not, so a difference varies as a count does whose steps are the followed blocks, times the
    uses of a block. The pools that stand for others have few blocks and vary in size, and so do the hits of the pool
    itself, by which a hit's seconds are found.
    """
    one_in, window = insight.curve.one_in, insight.window
    uses = max(insight.asked_blocks / max(insight.distinct_blocks, 1), 1.0)
    counted = (one_in - 1) * uses * (added + one_in)
    own = window.hit_blocks[1.0]
    missed = max(window.asked_blocks - own, 0)
    of_own = added**2 * (one_in - 1) * missed / own**2
    of_size = added**2 * (one_in - 1) / max(stats.readable, 1)
    of_order = (_APART * window.asked_blocks) ** 2
    return _SURE * math.sqrt(counted + of_own + of_size + of_order)


def read_curve(hits: Mapping[float, int], memory: float) -> tuple[float, float]:
    """Returns the hits at a memory that may lie between the curve's, and by how much they may be wrong.

    Between two of its points, a curve that bends one way lies between its chord and the lines through its neighbours.
    """
    if memory in hits:
        return float(hits[memory]), 0.0
    known = sorted(hits)
    after = next(at for at, one in enumerate(known) if one > memory)
    left, right = known[after - 1], known[after]
    low, high = sorted((hits[left], hits[right]))

    def line(one: float, other: float) -> float:
        slope = (hits[other] - hits[one]) / (other - one)
        return min(max(hits[one] + slope * (memory - one), low), high)

    chord = line(left, right)
    ends = [line(*known[at : at + 2]) for at in (after - 2, after) if 0 <= at < len(known) - 1]
    if all(end >= chord for end in ends):
        bounds = chord, min(ends, default=float(high))
    elif all(end <= chord for end in ends):
        bounds = max(ends), chord
    else:
        bounds = min(ends), max(ends)
    share = math.log(memory / left) / math.log(right / left)
    found = min(max(hits[left] + share * (hits[right] - hits[left]), bounds[0]), bounds[1])
    return found, max(bounds[1] - found, found - bounds[0])


def tell(size: SizeWorth, span_s: float) -> str:
    """Returns a sentence about a size."""
    more = size.added_bytes > 0
    saved_s = abs(size.saved_s)
    unit_s, unit = _find_unit(max(saved_s, size.error_s))
    span_unit_s, span_unit = _find_unit(span_s)
    line = (
        f"{_size(abs(size.added_bytes))} {'more' if more else 'less'} would have "
        f"{'saved' if more else 'cost'} {_count(saved_s / unit_s, unit)} of prefill in the last "
        f"{_count(span_s / span_unit_s, span_unit)} (±{_short(size.error_s / unit_s)})"
    )
    if size.price is None:
        return line
    return f"{line}; in money {size.price:+,.2f} (±{size.price_error:,.2f}), less the price of the memory"


def _size(size_bytes: int) -> str:
    return f"{_short(size_bytes / GIB)} GiB" if size_bytes >= GIB else f"{_short(size_bytes / MIB)} MiB"


def _find_unit(seconds: float) -> tuple[int, str]:
    return next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])


def _count(count: float, unit: str) -> str:
    text = _short(count)
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


def _short(count: float) -> str:
    return f"{count:,.1f}".removesuffix(".0") if count < 10 else f"{count:,.0f}"
