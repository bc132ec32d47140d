"""The most tokens that any policy could hit with the bytes of a pool: a bound, computed offline from all requests.

A policy may keep whatever an earlier request has passed, as long as the bytes that it keeps from one request to the
next fit, and a hit up to a boundary needs all blocks there that `needed_blocks` names: of full attention those of the
whole prefix, of a window the last ones, and the state at the boundary. The bound gives each of these bytes a price in
tokens at each time. With any prices at all, no policy hits more than the room is worth and what each request gains if
it pays for the blocks that it hits; prices are sought that make this little.

It is above the optimum because a request is taken to make all windows and states that it passes, also those before the
end of its hit; because a part of a request may be kept for a part of its hit; and because saves, loads and requests
that run at the same time take no time. With one group of full attention it is the optimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffload.cache import GroupRule, needed_blocks
from kvoffload.kvspec import ReuseRule

MAX_ROUNDS = 3000
PATIENCE = 20
"""Rounds without progress after which smaller progress is aimed at."""
PRECISION = 2e-4
"""The search for prices ends when it aims at less than this share of the bound."""
_Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    """A request, by the blocks that it passes from its first token to its last."""

    names: Sequence[Hashable]
    """One name for each `unit` of its tokens. A name stands for the whole prefix up to its end."""
    limit: int
    """The most of its tokens that may be hit."""
    room_bytes: float = inf
    """The most bytes that can be kept from this request to the next one."""
    state_ends: Collection[int] | None = None
    """Boundaries at which the engine makes states; None: at all that it passes."""


@dataclass(frozen=True)
class _Kept:
    """Blocks of groups with the same rule."""

    size_bytes: int
    per_block: int
    firsts: _Places
    """By boundary, the first block that a hit there needs."""
    ends: _Places


class _Route:
    """The hits that one request may have, and what they cost."""

    def __init__(self, number: int, passed: _Places, boundaries: _Places, kept: Sequence[_Kept], step: int) -> None:
        self._number = number
        self._boundaries = boundaries
        at = boundaries // step - 1
        self._kept = [
            (one.size_bytes, passed[one.per_block - 1 :: one.per_block], one.firsts[at], one.ends[at]) for one in kept
        ]

    @property
    def longest(self) -> int:
        return int(self._boundaries[-1]) if len(self._boundaries) else 0

    def note_most(self, live: npt.NDArray[np.float64]) -> None:
        """Adds the bytes that all hits together would keep, when they begin and end to be kept."""
        for size_bytes, passed, _, ends in self._kept:
            if len(ends):
                self._note(live, size_bytes, passed[: ends[-1]])

    def choose(self, worth: npt.NDArray[np.float64], live: npt.NDArray[np.float64]) -> float:
        """Returns what the best hit gains: its tokens without the prices of its blocks. `worth` sums the prices of a
        byte up to each request. Adds the bytes of the hit's blocks to `live`."""
        if not len(self._boundaries):
            return 0.0
        gains = self._boundaries.astype(np.float64)
        for size_bytes, passed, firsts, ends in self._kept:
            sums = np.concatenate(([0.0], np.cumsum(worth[self._number] - worth[passed])))
            gains -= size_bytes * (sums[ends] - sums[firsts])
        best = int(gains.argmax())
        if gains[best] <= 0:
            return 0.0
        for size_bytes, passed, firsts, ends in self._kept:
            self._note(live, size_bytes, passed[firsts[best] : ends[best]])
        return float(gains[best])

    def _note(self, live: npt.NDArray[np.float64], size_bytes: int, passed: _Places) -> None:
        live[: self._number + 1] += size_bytes * np.bincount(passed, minlength=self._number + 1)
        live[self._number] -= size_bytes * len(passed)


class HitBound:
    """Requests in the order in which they come, and the prices of a byte between them. `groups` are the rules of those
    that are stored, with the bytes of a block; `unit` is the tokens of a name, `step` those of which each hit is a
    multiple."""

    def __init__(
        self, groups: Sequence[tuple[GroupRule, int]], passages: Sequence[Passage], *, unit: int, step: int
    ) -> None:
        self._step = step
        longest = max((one.limit for one in passages), default=0)
        boundaries = np.arange(step, longest + 1, step)
        kept = _join(groups, boundaries, unit)
        with_states = any(rule.reuse is ReuseRule.EXACT_BOUNDARY for rule, _ in groups)
        last: dict[Hashable, int] = {}
        made: set[Hashable] = set()
        """Names at whose ends there was a state."""
        self._routes: list[_Route] = []
        for number, one in enumerate(passages):
            passed: list[int] = []
            for name in one.names:
                if (before := last.get(name)) is None:
                    break
                passed.append(before)
            last.update(dict.fromkeys(one.names, number))
            mine = boundaries[: min(one.limit, len(passed) * unit) // step]
            if with_states:
                mine = np.array([end for end in mine.tolist() if one.names[end // unit - 1] in made], np.int64)
                ends = one.state_ends
                made.update(one.names if ends is None else (one.names[end // unit - 1] for end in ends if end))
            self._routes.append(_Route(number, np.array(passed, np.int64), mine, kept, step))
        live = np.zeros(len(passages))
        for route in self._routes:
            route.note_most(live)
        room = np.array([one.room_bytes for one in passages])
        self._tight = np.flatnonzero(np.cumsum(live) > room)
        """The requests after which not everything can be kept that a later one might hit."""
        self._room = np.maximum(room[self._tight], 1.0)
        self._count = len(passages)

    @property
    def all_tokens(self) -> int:
        """Tokens that would be hit if there were room for everything."""
        return sum(route.longest for route in self._routes)

    def count(self) -> int:
        """Returns the bound, in tokens. All hits are multiples of `step`, and so is the bound."""
        prices = best_prices = np.zeros(len(self._tight))
        value, slope = self._evaluate(prices)
        best = value
        aim, reached, rounds, direction = best / 4, best, 0, np.zeros_like(prices)
        for _ in range(MAX_ROUNDS):
            if not len(prices) or aim < max(PRECISION * best, self._step / 8):
                break
            # Towards `aim` less than the best value, as Polyak's rule says, and a little of the way before.
            direction = slope + 0.5 * direction
            length = float(direction @ direction)
            if length == 0.0:
                break
            prices = np.maximum(prices - (value - best + aim) / length * direction, 0.0)
            value, slope = self._evaluate(prices)
            if value < best:
                best, best_prices = value, prices
            rounds += 1
            if best < reached - aim / 2:
                reached, rounds = best, 0
            elif rounds > PATIENCE:
                aim, reached, rounds = aim / 2, best, 0
                prices, direction = best_prices, np.zeros_like(prices)
                value, slope = self._evaluate(prices)
        return int((best + 1e-6) // self._step) * self._step

    def _evaluate(self, prices: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        """Returns the bound with these prices, which are those of all room at a time, and its slope."""
        of_byte = np.zeros(self._count + 1)
        of_byte[self._tight + 1] = prices / self._room
        worth, live = np.cumsum(of_byte)[: self._count], np.zeros(self._count)
        value = float(prices.sum()) + sum(route.choose(worth, live) for route in self._routes)
        return value, 1.0 - np.cumsum(live)[self._tight] / self._room


def _join(groups: Sequence[tuple[GroupRule, int]], boundaries: _Places, unit: int) -> list[_Kept]:
    sizes: Counter[GroupRule] = Counter()
    for rule, size_bytes in groups:
        if rule.reuse is not ReuseRule.NOTHING:
            sizes[rule] += size_bytes
    kept = []
    for rule, size_bytes in sizes.items():
        needed = [needed_blocks(rule, local=0, boundary=boundary) for boundary in boundaries.tolist()]
        firsts = np.array([max(one.start, 0) for one in needed], np.int64)
        ends = np.array([one.stop for one in needed], np.int64)
        kept.append(_Kept(size_bytes, rule.block_size // unit, firsts, ends))
    return kept
