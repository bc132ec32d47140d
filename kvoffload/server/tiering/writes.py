"""Blocks on their way from memory to a slower tier: noted, leased, written, released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np

from kvoffload.cache import LeasedGroup, LeaseFor, LeaseId, LocalCache, SessionId, StoredBlocks
from kvoffload.hash_rows import Rows, as_rows
from kvoffload.server.tiering.bad_records import BadRecords
from kvoffload.server.tiering.rate import TierRate
from kvoffload.server.tiering.settings import (
    PIECE_BLOCKS,
    FindSpace,
    TierCounts,
    TierSettings,
    TierSpace,
    WriteRule,
    cut_pieces,
)
from kvoffload.tiers import FinishedBatch, RecordOutcome, Tier
from kvoffload.tiers.base import RecordBatch
from kvoffload.types import HASH_BYTES

_LOOKS = 3
"""Attempts to lease those of a piece's blocks that are there, before it is given up: another thread may evict in
between."""
_TURN_BLOCKS = 4 * PIECE_BLOCKS
"""Number of blocks of which one `advance` makes writes, rounded up to a whole piece."""
_UNDER_WAY_BLOCKS = 8 * PIECE_BLOCKS
"""Number of blocks under way, rounded up likewise. More of small records would take the server's loop for too long when
they all end at once."""
_NO_PARENT = bytes(HASH_BYTES)


OnWritten = Callable[[TierSpace, StoredBlocks], None]


@dataclass(eq=False)
class _Noted:
    """Blocks of one group that were stored together."""

    space: TierSpace
    group: int
    hashes: Rows
    parents: Rows

    @property
    def size_bytes(self) -> int:
        return len(self.hashes) * self.space.block_bytes(self.group)

    def may_have(self, more: _Noted, limit_bytes: int) -> bool:
        """Whether the two can be written as one piece."""
        is_same = self.space is more.space and self.group == more.group
        count = len(self.hashes) + len(more.hashes)
        return is_same and count <= PIECE_BLOCKS and self.size_bytes + more.size_bytes <= limit_bytes

    def with_more(self, more: _Noted) -> _Noted:
        hashes, parents = (self.hashes, more.hashes), (self.parents, more.parents)
        return _Noted(self.space, self.group, np.concatenate(hashes), np.concatenate(parents))

    def part(self, chosen: slice | np.ndarray) -> _Noted:
        return _Noted(self.space, self.group, self.hashes[chosen], self.parents[chosen])


@dataclass(eq=False)
class _Writing:
    """A piece that the tier is writing, and the lease on its blocks."""

    noted: _Noted
    lease: LeaseId
    size_bytes: int
    waits_for: int
    """Number of batches that have not ended: one for each shard."""
    is_good: np.ndarray
    forgotten: np.ndarray


class TierWrites:
    """Belongs to the thread of the server's core. Nothing here waits."""

    def __init__(
        self, tier: Tier, settings: TierSettings, find_space: FindSpace, counts: TierCounts, bad: BadRecords
    ) -> None:
        self._bad = bad
        self.rate = TierRate()
        self._tier = tier
        self._settings = settings
        self._find_space = find_space
        self._counts = counts
        self._cache: LocalCache | None = None
        self._session = SessionId(0)
        self._kept_limit = self._queue_limit = 0
        self._kept: deque[_Noted] = deque()
        """Blocks that are kept to be written back later, the oldest first."""
        self._kept_bytes = 0
        self._queue: deque[_Noted] = deque()
        self._queued_bytes = 0
        self._writing: dict[int, _Writing] = {}
        """Pieces that the tier is writing, by its ticket."""
        self._under_way_blocks = 0
        self.is_behind = False
        """Whether `advance` has more to do at once."""
        self.on_written: OnWritten = lambda *_: None
        """Called with blocks that the tier has from now on."""

    def attach(self, cache: LocalCache, session: SessionId) -> None:
        self._cache, self._session = cache, session
        capacity_bytes = cache.stats.capacity_bytes
        self._kept_limit = int(capacity_bytes * self._settings.kept_share)
        self._queue_limit = int(capacity_bytes * self._settings.queue_share)

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that are queued, or that the tier is writing."""
        return self._queued_bytes + self.rate.queued_bytes

    @property
    def is_moving(self) -> bool:
        """Whether something is queued, or the tier is writing something."""
        return bool(self._queue or self._writing)

    @property
    def is_idle(self) -> bool:
        return not (self._kept or self._queue or self._writing)

    def note(self, name_space: int, stored: StoredBlocks) -> None:
        """Notes that these blocks can be read in memory from now on, and queues or keeps those that should be
        written."""
        group, hashes, parents = stored
        space = self._find_space(name_space)
        if space is None or not hashes or self._cache is None:
            return
        names = as_rows(hashes)
        before = as_rows(parents) if parents else as_rows(_NO_PARENT * len(names))
        noted = _Noted(space, group, names, before)
        if self._settings.wants is not None:
            noted = noted.part(self._settings.wants(hashes))
            if not len(noted.hashes):
                return
        if self._settings.write is WriteRule.THROUGH:
            self._enqueue(noted)
            return
        self._kept.append(noted)
        self._kept_bytes += noted.size_bytes
        self._take_kept(self._kept_limit)

    def forget(self, space: TierSpace, group: int, hashes: bytes) -> None:
        """Notes that blocks on their way to the tier must not be trusted. Those that the tier has already are removed
        elsewhere."""
        names = {row.tobytes() for row in as_rows(hashes)}
        for writing in self._writing.values():
            noted = writing.noted
            if (noted.space.number, noted.group) == (space.number, group):
                writing.forgotten |= np.array([row.tobytes() in names for row in noted.hashes])

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Drops the waiting blocks of these identities, all of which memory has lost."""
        for waiting in (self._kept, self._queue):
            gone = [noted for noted in waiting if noted.space.number in name_spaces]
            if not gone:
                continue
            left = [noted for noted in waiting if noted.space.number not in name_spaces]
            waiting.clear()
            waiting.extend(left)
            size_bytes = sum(noted.size_bytes for noted in gone)
            if waiting is self._kept:
                self._kept_bytes -= size_bytes
            else:
                self._queued_bytes -= size_bytes
            self._counts.dropped_gone += sum(len(noted.hashes) for noted in gone)

    def flush(self) -> None:
        """Queues all blocks that are kept to be written back, those that are worth most first, without a bound: the
        server ends, and the time for that is bounded."""
        self._kept = deque(sorted(self._kept, key=self._value_of, reverse=True))
        self._take_kept(0, is_bounded=False)

    def offer(self, space: TierSpace, stored: StoredBlocks) -> None:
        """Queues blocks whatever the write rule says, without a bound. The caller gives a few at a time."""
        self._enqueue(_Noted(space, stored.group, as_rows(stored.hashes), as_rows(stored.parents)), is_bounded=False)

    def advance(self, now_s: float) -> None:
        """Gives the tier as many pieces as it may have, or some of them: then it `is_behind`."""
        self.is_behind, left = False, _TURN_BLOCKS
        while self._queue and self._may_write():
            if left <= 0:
                self.is_behind = True
                return
            left -= len(self._queue[0].hashes)
            noted = self._queue.popleft()
            self._queued_bytes -= noted.size_bytes
            if not self._write(noted, now_s):
                # The tier takes no more batches now.
                self._queue.appendleft(noted)
                self._queued_bytes += noted.size_bytes
                return

    def finish(self, batch: FinishedBatch, now_s: float) -> bool:
        """Takes a batch that has ended. False: it is not one of these."""
        writing = self._writing.pop(batch.ticket, None)
        if writing is None:
            return False
        is_written = (batch.outcomes == RecordOutcome.WRITTEN) | (batch.outcomes == RecordOutcome.DURABLE)
        writing.is_good &= is_written
        damaged = batch.outcomes == RecordOutcome.DAMAGED
        assert self._cache is not None
        noted = writing.noted
        if damaged.any():
            # The bytes in memory are not those that were saved.
            self._counts.quarantined += int(damaged.sum())
            self._cache.leave_invalidate(noted.space.number, noted.group, noted.hashes[damaged].tobytes())
        writing.waits_for -= 1
        size_bytes = writing.size_bytes // noted.space.shards(noted.group)
        moved = int(is_written.sum()) * noted.space.record_bytes(noted.group)
        self.rate.end(size_bytes, now_s, moved_bytes=moved)
        if not writing.waits_for:
            self._under_way_blocks -= len(noted.hashes)
            self._cache.release(self._session, writing.lease)
            for shard in range(noted.space.shards(noted.group) if writing.forgotten.any() else 0):
                names = noted.space.names(noted.group, noted.hashes[writing.forgotten].tobytes(), shard)
                self._bad.add(names)
            good = int(writing.is_good.sum())
            kept = noted.part(writing.is_good & ~writing.forgotten)
            self._note_there(kept)
            self.on_written(noted.space, StoredBlocks(noted.group, kept.hashes.tobytes(), kept.parents.tobytes()))
            self._counts.written += good
            self._counts.written_bytes += good * noted.space.block_bytes(noted.group)
            self._counts.failed += len(noted.hashes) - good
        return True

    # ---- inside ----

    def _note_there(self, noted: _Noted) -> None:
        """Notes in memory that the tier has these blocks, too: eviction loses less by them."""
        if len(noted.hashes) and self._cache is not None:
            there = np.ones(len(noted.hashes), np.bool_)
            self._cache.leave_tier_notes(noted.space.number, noted.group, noted.hashes.tobytes(), there)

    def _may_write(self) -> bool:
        has_room = (
            self._under_way_blocks < _UNDER_WAY_BLOCKS and self.rate.queued_bytes < self._settings.under_way_bytes
        )
        return has_room and self._cache is not None

    def _value_of(self, noted: _Noted) -> float:
        assert self._cache is not None
        return float(self._cache.find_values(noted.space.number, noted.group, noted.hashes.tobytes()).max())

    def _take_kept(self, limit_bytes: int, *, is_bounded: bool = True) -> None:
        while self._kept and self._kept_bytes > limit_bytes:
            noted = self._kept.popleft()
            self._kept_bytes -= noted.size_bytes
            if self._settings.write is WriteRule.SECOND_USE and self._cache is not None:
                noted = noted.part(self._cache.find_used(noted.space.number, noted.group, noted.hashes.tobytes()))
            self._enqueue(noted, is_bounded=is_bounded)

    def _enqueue(self, noted: _Noted, *, is_bounded: bool = True) -> None:
        size_bytes = noted.size_bytes
        waiting_bytes = self.waiting_bytes + size_bytes
        # The rate measured with a few small records says little, so one piece may always wait.
        in_time_bytes = max(self._settings.queue_s * self.rate.bytes_per_s, self._settings.piece_bytes)
        limit_bytes = min(in_time_bytes, self._queue_limit)
        # One batch may be larger than the bound: it is taken if nothing else waits.
        if is_bounded and waiting_bytes > limit_bytes and self.waiting_bytes:
            self._counts.dropped_full += len(noted.hashes)
            return
        if self._queue and self._queue[-1].may_have(noted, self._settings.piece_bytes):
            # An engine that saves block by block has them written together all the same.
            self._queue[-1] = self._queue[-1].with_more(noted)
        else:
            block_bytes = noted.space.block_bytes(noted.group)
            for part in cut_pieces(len(noted.hashes), block_bytes, self._settings.piece_bytes):
                self._queue.append(noted.part(part))
        self._queued_bytes += size_bytes

    def _write(self, noted: _Noted, now_s: float) -> bool:
        """Gives the tier a piece. False: the tier cannot be given more now."""
        cache = self._cache
        assert cache is not None
        space, group = noted.space, noted.group
        is_written = space.find_whole(self._tier, group, noted.hashes.tobytes())
        self._note_there(noted.part(is_written))
        noted = noted.part(~is_written)
        for _ in range(_LOOKS):
            if not len(noted.hashes):
                return True
            hashes = noted.hashes.tobytes()
            is_there = cache.lookup(space.number, group, hashes)
            self._counts.dropped_gone += int((~is_there).sum())
            noted = noted.part(is_there)
            hashes = noted.hashes.tobytes()
            if not hashes:
                return True
            shards = range(space.shards(group))
            found = cache.acquire_entries(
                self._session, space.number, group, hashes, shards=shards, lease_for=LeaseFor.UPKEEP
            )
            if found.is_hit:
                return self._put(noted, found.lease, found.groups[group], now_s)
        self._counts.dropped_gone += len(noted.hashes)
        return True

    def _put(self, noted: _Noted, lease: LeaseId, leased: LeasedGroup, now_s: float) -> bool:
        cache, space, group = self._cache, noted.space, noted.group
        assert cache is not None
        hashes, record_bytes = noted.hashes.tobytes(), space.record_bytes(group)
        pointers = cache.pointers(leased.addresses)
        count = len(noted.hashes)
        writing = _Writing(noted, lease, noted.size_bytes, 0, np.ones(count, np.bool_), np.zeros(count, np.bool_))
        for shard, digests in enumerate(leased.digests):
            batch = RecordBatch(
                space.names(group, hashes, shard),
                pointers + np.uint64(shard * record_bytes),
                record_bytes=record_bytes,
                digests=digests,
                parents=noted.parents.tobytes(),
            )
            ticket = self._tier.put(batch, timeout_s=self._settings.put_timeout_s)
            if not ticket:
                break
            self._writing[ticket] = writing
            writing.waits_for += 1
            self.rate.begin(writing.size_bytes // space.shards(group), now_s)
        if not writing.waits_for:
            cache.release(self._session, lease)
            return False
        self._under_way_blocks += count
        if writing.waits_for < space.shards(group):
            writing.is_good[:] = False
        return True
