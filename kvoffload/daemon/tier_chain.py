"""The tiers below a domain's memory, the nearest first: what one of them lacks is asked of the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry
from kvoffload.daemon.promotion_parts import Answer, Wanted
from kvoffload.daemon.served_cache import ServedCache
from kvoffload.daemon.tier_terms import TierPlan, TierSpace
from kvoffload.daemon.tier_traffic import PREFETCH_WAIT_MS, TierTraffic
from kvoffload.protocol import Prefetch, Promote, Promoted, PromotionOutcome
from kvoffload.tiers import RecordNames

_ROUNDS = 3
"""A farther tier may fill a gap behind which a nearer one has more."""
_RANKS = (PromotionOutcome.PARTLY, PromotionOutcome.COMPLETE, PromotionOutcome.TOO_SLOW)
"""What is said of all tiers together: the first of these that one of them said."""


def open_chains(plans: Mapping[str, Sequence[TierPlan]], *, open_pidfd: Callable[[], int]) -> dict[str, TierChain]:
    """By domain, where it has tiers. `open_pidfd`: of the process that owns the slots of what is under way."""
    return {
        name: TierChain([TierTraffic(tier.place.open_tier(), tier.terms, open_pidfd=open_pidfd) for tier in below])
        for name, below in plans.items()
        if below
    }


@dataclass(eq=False)
class _Walk:
    """One request's, from tier to tier."""

    message: Promote
    answer: Answer
    end_s: float
    boundary: int
    outcomes: set[PromotionOutcome] = field(default_factory=set)
    has_more: bool = False
    """A farther tier brought something up in this round."""
    rounds: int = 0


class TierChain:
    """Belongs to the thread of the server's core. Nothing here waits but `close`."""

    def __init__(self, tiers: Sequence[TierTraffic]) -> None:
        self.tiers = tuple(tiers)
        self._now_s = 0.0

    def attach(self, cache: ServedCache, tell: Callable[[TierSpace, int, bytes, bytes], None]) -> None:
        """The memory is there. `tell` hears of blocks that came up; so do the tiers above the one they came from."""
        for at, tier in enumerate(self.tiers):
            above = self.tiers[:at]

            def came_up(
                space: TierSpace, group: int, hashes: bytes, parents: bytes, above: Sequence[TierTraffic] = above
            ) -> None:
                tell(space, group, hashes, parents)
                for nearer in above:
                    nearer.note_stored(space.number, group, hashes, parents)

            tier.attach(cache, came_up)

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """Blocks of this identity are moved from here on."""
        for tier in self.tiers:
            tier.learn(name_space, fingerprint, geometry)

    def files(self) -> list[int]:
        """Readable when `advance` may have something to do."""
        return [tier.fileno() for tier in self.tiers]

    def next_s(self) -> float | None:
        """When `advance` has something to do at the latest."""
        times = [tier.next_s() for tier in self.tiers]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def note_stored(self, name_space: int, group: int, hashes: bytes, parents: bytes) -> None:
        """An engine's blocks can be read in memory from now on."""
        for tier in self.tiers:
            tier.note_stored(name_space, group, hashes, parents)

    def forget(self, name_space: int, group: int, hashes: bytes) -> None:
        """These blocks are not to be trusted, wherever they are."""
        for tier in self.tiers:
            tier.forget(name_space, group, hashes)

    def promote(self, message: Promote, now_s: float, answer: Answer) -> None:
        """`answer` is called once: now, or from a later call of this object."""
        self._now_s = now_s
        walk = _Walk(message, answer, now_s + message.wait_ms / 1000, message.local)
        self._ask(walk, 0)

    def prefetch(self, message: Prefetch, now_s: float) -> None:
        """A request with this chain comes soon."""
        wanted = Promote(
            name_space=message.name_space,
            chain=message.chain,
            local=message.local,
            limit=message.limit,
            wait_ms=PREFETCH_WAIT_MS,
        )
        self.promote(wanted, now_s, lambda _: None)

    def find_near(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Which of these records tiers have that know it. From any thread."""
        found = np.zeros(len(names), np.bool_)
        for tier in self.tiers:
            found |= tier.find_near(names)
        return found

    def bring(self, wanted: Wanted, now_s: float) -> None:
        """From the nearest tier that knows what it has."""
        near = next((tier for tier in self.tiers if tier.knows_all), None)
        if near is None:
            wanted.answer(Promoted(outcome=PromotionOutcome.NOTHING, boundary=0))
        else:
            near.bring(wanted, now_s)

    def advance(self, now_s: float) -> None:
        """Takes what has ended, and gives the tiers what they may have."""
        self._now_s = now_s
        for tier in self.tiers:
            tier.advance(now_s)

    def look(self) -> None:
        """To be called now and then."""
        for tier in self.tiers:
            tier.look()

    def close(self, now_s: Callable[[], float]) -> None:
        """The server ends. After it no slot of the memory is touched."""
        for tier in self.tiers:
            tier.close(now_s)

    def _ask(self, walk: _Walk, at: int) -> None:
        left_ms = round((walk.end_s - self._now_s) * 1000)
        message = replace(walk.message, wait_ms=max(left_ms, 0))
        self.tiers[at].promote(message, self._now_s, lambda promoted: self._hear(walk, at, promoted))

    def _hear(self, walk: _Walk, at: int, promoted: Promoted) -> None:
        walk.boundary = max(walk.boundary, promoted.boundary)
        walk.outcomes.add(promoted.outcome)
        walk.has_more |= at > 0 and promoted.outcome is PromotionOutcome.COMPLETE
        has_time = self._now_s < walk.end_s
        if has_time and at + 1 < len(self.tiers):
            self._ask(walk, at + 1)
            return
        walk.rounds += 1
        if has_time and walk.has_more and walk.rounds < _ROUNDS:
            walk.has_more = False
            self._ask(walk, 0)
            return
        outcome = next((one for one in _RANKS if one in walk.outcomes), PromotionOutcome.NOTHING)
        walk.answer(Promoted(outcome=outcome, boundary=walk.boundary))
