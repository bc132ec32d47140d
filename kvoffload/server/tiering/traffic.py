"""A domain's traffic with one tier below its memory: what is written down, what is brought up."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Set

import numpy as np
import numpy.typing as npt

from kvoffload.cache import NO_LIMIT, CacheGeometry, LocalCache, SessionId, StoredBlocks
from kvoffload.errors import TierError
from kvoffload.server.tiering.bad_records import BadRecords
from kvoffload.server.tiering.promotion import OnMissing, OnStored, Promotions
from kvoffload.server.tiering.terms import TierCounts, TierSpace, TierTerms
from kvoffload.server.tiering.writes import TierWrites
from kvoffload.tiers import RecordNames, Tier, TierHealth, TierState

logger = logging.getLogger(__name__)

PREFETCH_WAIT_MS = 2000
FLUSH_S = 5.0
LOOK_S = 0.02
WRITER_LOOK_S = 0.001
"""Between two looks at what was left to a thread that writes."""


class TierTraffic:
    """Belongs to the thread of the server's core, which watches the tier's file. Nothing here waits but `close`."""

    def __init__(self, tier: Tier, terms: TierTerms, *, open_pidfd: Callable[[], int]) -> None:
        """The tier is closed with it. `open_pidfd`: of the process that owns the slots of what is under way."""
        self._open_pidfd = open_pidfd
        self.terms = terms
        self.counts = TierCounts()
        self._tier = tier
        self._spaces: dict[int, TierSpace] = {}
        self._tell: OnStored = lambda *_: None
        self._states: dict[str, TierState] = {}
        """Of its places, by name: those of a fleet come and go."""
        self._advanced_s = 0.0
        self._bad = BadRecords(tier)
        self.writes = TierWrites(tier, terms, self._spaces.get, self.counts, self._bad)
        self._reads = Promotions(
            tier, terms, self._spaces.get, counts=self.counts, bad=self._bad, on_stored=self._tell_stored
        )

    def tell(self, *, written: OnStored, missing: OnMissing) -> None:
        """Blocks that the tier has from now on are told, and those that it was found not to have."""
        self.writes.on_written = written
        self._reads.on_missing = missing

    def find_there(self, space: TierSpace, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which blocks the tier has all shards of, as far as it knows."""
        return space.find_whole(self._tier, group, hashes)

    def _open_session(self, cache: LocalCache, held_limit_bytes: int) -> SessionId:
        session = cache.open_session(held_limit_bytes=held_limit_bytes)
        cache.add_process(session, pidfd=self._open_pidfd())
        return session

    def _tell_stored(self, space: TierSpace, stored: StoredBlocks) -> None:
        self._tell(space, stored)

    def attach(self, cache: LocalCache, tell: OnStored) -> None:
        """The memory is there. `tell` hears of blocks that came up."""
        held_bytes = int(cache.stats.capacity_bytes * self.terms.held_share)
        # Adopted memory may have no place for them. Both or none: nothing is moved then.
        writing, reading = self._open_session(cache, NO_LIMIT), self._open_session(cache, held_bytes or NO_LIMIT)
        self._tell = tell
        self.writes.attach(cache, writing)
        self._reads.attach(cache, reading)

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """Blocks of this identity are moved from here on."""
        self._spaces.setdefault(name_space, TierSpace(number=name_space, fingerprint=fingerprint, geometry=geometry))
        self.terms.on_learn(name_space, fingerprint, geometry)

    def forget_spaces(self, name_spaces: Set[int]) -> set[int]:
        """Nobody registers these any more, and memory has none of their blocks. Which ones are forgotten here: all but
        those for which something is to be done."""
        idle = name_spaces - self._reads.busy_spaces()
        known = {number: space for number in idle if (space := self._spaces.get(number)) is not None}
        stay = {number for number, space in known.items() if not self.terms.on_forget(space.fingerprint)}
        forgotten = set(idle - stay)
        for number in forgotten & known.keys():
            del self._spaces[number]
        self.writes.forget_spaces(forgotten)
        self._reads.forget_spaces(forgotten)
        return forgotten

    def fileno(self) -> int:
        """Readable when `advance` may have something to do."""
        return self._tier.fileno()

    def next_s(self) -> float | None:
        """When `advance` has something to do at the latest."""
        next_s = self._reads.next_s()
        if self._reads.awaits_writer:
            return self._advanced_s + WRITER_LOOK_S if next_s is None else min(next_s, self._advanced_s + WRITER_LOOK_S)
        return next_s

    def note_stored(self, name_space: int, stored: StoredBlocks) -> None:
        """An engine's blocks can be read in memory from now on."""
        self.writes.note(name_space, stored)

    def forget(self, name_space: int, group: int, hashes: bytes) -> None:
        """These blocks are not to be trusted, wherever they are."""
        space = self._spaces.get(name_space)
        if space is not None:
            self.writes.forget(space, group, hashes)
            self._reads.forget(space, group, hashes)

    @property
    def reads(self) -> Promotions:
        """Returns what comes up from the tier."""
        return self._reads

    def find_space(self, name_space: int) -> TierSpace | None:
        """Returns what is known of an identity; None: nobody has said what its blocks are."""
        return self._spaces.get(name_space)

    @property
    def spaces(self) -> list[TierSpace]:
        """Returns all identities of which it is known what their blocks are."""
        return list(self._spaces.values())

    @property
    def knows_all(self) -> bool:
        """Nobody else writes there."""
        return self._tier.knows_all

    def find_near(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Which of these records it has, as far as it knows. From any thread."""
        found = self._tier.contains(names)
        self._bad.leave_out(names, found)
        return found

    def advance(self, now_s: float) -> None:
        """Takes what has ended, and gives the tier what it may have."""
        self._advanced_s = now_s
        for batch in self._tier.poll():
            if not (self._reads.finish(batch, now_s) or self.writes.finish(batch, now_s)):
                self._bad.finish(batch)
        self._reads.expire(now_s)
        self._reads.advance(now_s)
        self.writes.advance(now_s)

    def look(self) -> None:
        """Is called now and then: says in one line each what has become of its places."""
        self._bad.retry()
        health = self._tier.health()
        for one in health:
            before = self._states.get(one.name, TierState.OPENING)
            if one.state is before or one.state is TierState.OPENING:
                continue
            if one.state is TierState.READY:
                logger.info("%s tier %s is ready: %d records", self.terms.name, one.name, one.records)
            else:
                logger.warning("%s tier %s is %s: %s", self.terms.name, one.name, one.state.value, one.reason)
        self._states = {one.name: one.state for one in health}

    def health(self) -> list[TierHealth]:
        """Returns how each of its places is."""
        return self._tier.health()

    @property
    def waiting_bytes(self) -> int:
        """Returns the bytes that are to be written."""
        return self.writes.waiting_bytes

    @property
    def waiting_requests(self) -> int:
        """Returns how many requests wait for what comes up."""
        return self._reads.waiting

    @property
    def is_idle(self) -> bool:
        """Nothing is to be written, and nobody waits."""
        return self.writes.is_idle and not self._reads.waiting

    def close(self, now_s: Callable[[], float]) -> None:
        """Closes the tier: the server ends. What is to be written is written, for FLUSH_S at most. After it no slot of
        the memory is touched."""
        end_s = now_s() + FLUSH_S
        self._reads.end_all(now_s())
        self.writes.flush()
        while not self.writes.is_idle and now_s() < end_s:
            self.advance(now_s())
            select.select([self.fileno()], [], [], LOOK_S)
        try:
            self._tier.close()
        except TierError as fault:
            logger.warning("%s tier: %s", self.terms.name, fault)
