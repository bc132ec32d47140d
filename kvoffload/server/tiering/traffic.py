"""A domain's traffic with one slower tier: what is written to it, and what is brought up."""

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
from kvoffload.server.tiering.settings import TierCounts, TierSettings, TierSpace, Wants
from kvoffload.server.tiering.value_walk import ValueWalk
from kvoffload.server.tiering.writes import TierWrites
from kvoffload.tiers import RecordNames, Tier, TierHealth, TierState
from kvoffload.units import format_size

logger = logging.getLogger(__name__)

PREFETCH_WAIT_MS = 2000
FLUSH_S = 5.0
LEAST_CLOSE_S = 1.0
"""Seconds that a tier has at least to end its connections, of which one may hang."""
LOOK_S = 0.02
WRITER_LOOK_S = 0.001
"""Seconds between two looks at what was left to a thread that writes."""


class TierTraffic:
    """Belongs to the thread of the server's core, which watches the tier's file. Nothing here waits but `close`."""

    def __init__(self, tier: Tier, settings: TierSettings, *, open_pidfd: Callable[[], int]) -> None:
        """Takes the tier, and closes it at the end. `open_pidfd` opens a pidfd of the process that owns the slots of
        what is under way."""
        self._open_pidfd = open_pidfd
        self.settings = settings
        self.counts = TierCounts()
        self._tier = tier
        self._spaces: dict[int, TierSpace] = {}
        self._tell: OnStored = lambda *_: None
        self._states: dict[str, tuple[TierState, str]] = {}
        """States of the tier's places, by name, with the reason of one that is ready. Those of a fleet come and go."""
        self._advanced_s = 0.0
        self._cache: LocalCache | None = None
        self._walk: ValueWalk | None = None
        """The walk through blocks that have another place in the tier now. None: no block has."""
        self._bad = BadRecords(tier)
        self.writes = TierWrites(tier, settings, self._spaces.get, self.counts, self._bad)
        self._reads = Promotions(
            tier, settings, self._spaces.get, counts=self.counts, bad=self._bad, on_stored=self._tell_stored
        )

    def tell(self, *, written: OnStored, missing: OnMissing) -> None:
        """Sets the callables that are called with blocks that the tier has from now on, and with those that it turned
        out not to have."""
        self.writes.on_written = written
        self._reads.on_missing = missing

    def find_there(self, space: TierSpace, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Returns which blocks the tier has all shards of, as far as it knows."""
        return space.find_whole(self._tier, group, hashes)

    def _open_session(self, cache: LocalCache, held_limit_bytes: int) -> SessionId:
        session = cache.open_session(held_limit_bytes=held_limit_bytes)
        cache.add_process(session, pidfd=self._open_pidfd())
        return session

    def _tell_stored(self, space: TierSpace, stored: StoredBlocks) -> None:
        self._tell(space, stored)

    def attach(self, cache: LocalCache, tell: OnStored) -> None:
        """Connects the memory. `tell` is called with blocks that came up."""
        held_bytes = int(cache.stats.capacity_bytes * self.settings.held_share)
        # Adopted memory may have no place for two sessions. Both are opened first, so that nothing is moved unless both
        # are there.
        writing, reading = self._open_session(cache, NO_LIMIT), self._open_session(cache, held_bytes or NO_LIMIT)
        self._tell = tell
        self._cache = cache
        self.writes.attach(cache, writing)
        self._reads.attach(cache, reading)

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """Notes an identity whose blocks may be moved from here on."""
        self._spaces.setdefault(name_space, TierSpace(number=name_space, fingerprint=fingerprint, geometry=geometry))
        self.settings.on_learn(name_space, fingerprint, geometry)

    def forget_spaces(self, name_spaces: Set[int]) -> set[int]:
        """Forgets identities that no session registers any more and that have no blocks in memory. Returns those that
        were forgotten here: all but those for which there is something to do."""
        idle = name_spaces - self._reads.busy_spaces()
        known = {number: space for number in idle if (space := self._spaces.get(number)) is not None}
        stay = {number for number, space in known.items() if not self.settings.on_forget(space.fingerprint)}
        forgotten = set(idle - stay)
        for number in forgotten & known.keys():
            del self._spaces[number]
        self.writes.forget_spaces(forgotten)
        self._reads.forget_spaces(forgotten)
        return forgotten

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `advance` may have something to do."""
        return self._tier.fileno()

    def next_s(self) -> float | None:
        """Returns the latest time at which `advance` has something to do."""
        if self.writes.is_behind or self._may_walk:
            return self._advanced_s
        next_s = self._reads.next_s()
        if self._reads.awaits_writer:
            return self._advanced_s + WRITER_LOOK_S if next_s is None else min(next_s, self._advanced_s + WRITER_LOOK_S)
        return next_s

    def note_stored(self, name_space: int, stored: StoredBlocks) -> None:
        """Notes that an engine's blocks can be read in memory from now on."""
        self.writes.note(name_space, stored)

    def forget(self, name_space: int, group: int, hashes: bytes) -> None:
        """Removes blocks that must not be trusted, here and on their way."""
        space = self._spaces.get(name_space)
        if space is not None:
            self.writes.forget(space, group, hashes)
            self._reads.forget(space, group, hashes)

    @property
    def reads(self) -> Promotions:
        """The blocks on their way up from the tier."""
        return self._reads

    def find_space(self, name_space: int) -> TierSpace | None:
        """Returns what is known of an identity, or None if nothing is."""
        return self._spaces.get(name_space)

    @property
    def spaces(self) -> list[TierSpace]:
        """The identities whose blocks may be moved."""
        return list(self._spaces.values())

    @property
    def knows_all(self) -> bool:
        """Whether the tier knows all that it has, because no other server writes there."""
        return self._tier.knows_all

    def find_near(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Returns which of these records the tier has, as far as it knows. From any thread."""
        found = self._tier.contains(names).copy()
        self._bad.leave_out(names, found)
        return found

    def advance(self, now_s: float) -> None:
        """Takes finished batches from the tier, and gives it as much new work as it may have."""
        self._advanced_s = now_s
        for batch in self._tier.poll():
            if not (self._reads.finish(batch, now_s) or self.writes.finish(batch, now_s)):
                self._bad.finish(batch)
        self._reads.expire(now_s)
        self._reads.advance(now_s)
        self._step()
        self.writes.advance(now_s)

    def look(self) -> None:
        """Tries again to remove bad records, begins to write blocks that have another place now, and logs each change
        of a place's state in one line. The event loop calls it periodically."""
        self._bad.retry()
        if self._walk is None:
            self._begin_walk(self.settings.find_moved())
        before, self._states = self._states, {}
        for one in self._tier.health():
            is_ready = one.state is TierState.READY
            # The reason of a place that is not ready may change with every attempt to reach it.
            self._states[one.name] = now = one.state, one.reason if is_ready else ""
            if one.state is TierState.OPENING or before.get(one.name) == now:
                continue
            if is_ready and not one.reason:
                logger.info("%s tier %s is ready: %d records", self.settings.name, one.name, one.records)
            else:
                logger.warning("%s tier %s is %s: %s", self.settings.name, one.name, one.state.value, one.reason)

    def health(self) -> list[TierHealth]:
        """Returns the state of each of the tier's places."""
        return self._tier.health()

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that wait to be written."""
        return self.writes.waiting_bytes

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for blocks to come up."""
        return self._reads.waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be written, and no request waits."""
        return self.writes.is_idle and not self._reads.waiting

    def close(self, now_s: Callable[[], float], *, until_s: float | None = None) -> None:
        """Closes the tier, as the server ends, after writing what waits to be written for FLUSH_S at most. After it no
        slot of the memory is touched. `until_s`: the memory goes with the server, so blocks that no other server has
        are handed over until then."""
        end_s = now_s() + FLUSH_S
        self._reads.end_all(now_s())
        self.writes.flush()
        if until_s is not None:
            end_s = min(end_s, until_s) if self.knows_all else until_s
            self._write_until(now_s, end_s)
            self._hand_over(now_s, end_s)
        self._write_until(now_s, end_s)
        try:
            if until_s is None:
                self._tier.close()
            else:
                self._tier.close(max(until_s - now_s(), LEAST_CLOSE_S))
        except TierError as fault:
            logger.warning("%s tier: %s", self.settings.name, fault)

    # ---- inside ----

    @property
    def _may_walk(self) -> bool:
        return self._walk is not None and self.writes.waiting_bytes < self.settings.under_way_bytes

    def _begin_walk(self, wants: Wants | None) -> None:
        if wants is not None and self._cache is not None:
            self._walk = ValueWalk(self._cache, self.spaces, wants, part_bytes=self.settings.under_way_bytes)

    def _step(self) -> None:
        """Offers a part of the blocks that have another place now, if the tier has little to write."""
        if self._walk is None or not self._may_walk:
            return
        for found in self._walk:
            if found is not None:
                self.writes.offer(*found)
            return
        self._walk = None

    def _hand_over(self, now_s: Callable[[], float], end_s: float) -> None:
        """Writes the blocks that no other server has, those that are worth most first."""
        self._begin_walk(self.settings.on_leave())
        walk = self._walk
        if walk is None:
            return
        before = self.counts.written, self.counts.written_bytes
        self._write_until(now_s, end_s)
        blocks, size_bytes = self.counts.written - before[0], self.counts.written_bytes - before[1]
        line = "%s tier: %d blocks (%s) that only this server had were handed over, %d were left"
        logger.info(line, self.settings.name, blocks, format_size(size_bytes), max(walk.count - blocks, 0))

    def _write_until(self, now_s: Callable[[], float], end_s: float) -> None:
        while not (self.writes.is_idle and self._walk is None) and now_s() < end_s:
            self.advance(now_s())
            wait_s = 0.0 if self.writes.is_behind or self._may_walk else min(LOOK_S, max(end_s - now_s(), 0.0))
            select.select([self.fileno()], [], [], wait_s)
