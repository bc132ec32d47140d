"""Peers' access to a domain's memory: they look, take a lease, leave records, and remove them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.cache import NO_LIMIT, CommitOutcome, LeaseId, LocalCache, StoredBlocks
from kvoffload.hash_rows import as_rows, choose_rows
from kvoffload.peers.space_table import PeerSpace, SpaceTable
from kvoffload.tiers.base import Addresses, Digests, RecordNames, RecordOutcome
from kvoffload.types import HASH_BYTES

STAGED_LIMIT = 65_536
"""Blocks of which some shards have come; beyond it new ones are refused."""
STAGED_S = 30.0
"""Seconds for which a block waits for its other shards."""
HELD_SHARE = 0.25
"""Share of memory that links may hold in leases and slots together."""
_LOOKS = 3
"""Number of times that a get tries to lease the records it has found: others evict in between."""

_IS_STORED = np.zeros(256, np.bool_)
_IS_STORED[[CommitOutcome.READABLE, CommitOutcome.INCOMPLETE, CommitOutcome.DUPLICATE]] = True


class PeerLoop(Protocol):
    """The services of the server's loop, which owns the slower tiers. Safe to call from any thread."""

    def tell_stored(self, space: PeerSpace, stored: StoredBlocks) -> None:
        """Takes the news that these blocks became readable."""
        ...

    def remove(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> bool:
        """Removes blocks that must not be trusted, wherever they are: no look-up finds them afterwards, and copies
        under way between memory and slower tiers are dropped. False: that could not be done in time."""
        ...

    def find_below(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Returns which of these lie in slower tiers."""
        ...

    def bring(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> None:
        """Brings blocks up to memory, if that is possible. Waits for it for at most `wait_s`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Records under a lease, ready to send. `found`: which of those asked for; slots and digests are of these."""

    found: npt.NDArray[np.bool_]
    slots: Addresses
    digests: Digests
    lease: LeaseId | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Slots for records that will come. `wanted`: which ones; `outcomes` are final for the others."""

    space: PeerSpace
    outcomes: npt.NDArray[np.uint8]
    wanted: npt.NDArray[np.bool_]
    slots: Addresses
    tickets: npt.NDArray[np.uint64]


@dataclass(eq=False)
class _Staged:
    """A block of which some shards have come, or are coming."""

    ticket: int
    slot: int
    touched_s: float
    shards: set[int] = field(default_factory=set)
    """Shards that have come, or are coming."""
    moving: set[int] = field(default_factory=set)
    """Those of `shards` that a link is writing now. While there are any, the slot is not given to others."""


class PeerAccess:
    """Serves one domain's records to peers. Safe to call from any thread."""

    def __init__(
        self,
        cache: LocalCache,
        spaces: SpaceTable,
        loop: PeerLoop,
        *,
        pidfd: int,
        clock: Callable[[], float],
    ) -> None:
        """Opens a session of the cache; `pidfd` is that of the process whose links these are."""
        self.cache = cache
        self._spaces = spaces
        self._loop = loop
        self._clock = clock
        self._session = cache.open_session(held_limit_bytes=int(cache.stats.capacity_bytes * HELD_SHARE) or NO_LIMIT)
        cache.add_process(self._session, pidfd=pidfd)
        self._lock = threading.Lock()
        self._staged: dict[tuple[int, int, bytes], _Staged] = {}

    def count(self) -> tuple[int, int]:
        """Returns the bytes of memory, and how many of them are used."""
        stats = self.cache.stats
        return stats.capacity_bytes, stats.used_bytes

    def use(self, fingerprint: bytes) -> AbstractContextManager[bool]:
        """Yields whether an identity and the shape of its records are known. If so, it is not forgotten before the
        end."""
        return self._spaces.use(fingerprint)

    def look(self, names: RecordNames) -> npt.NDArray[np.uint8]:
        """Returns FOUND or MISSING for each record."""
        space = self._spaces.find(names.fingerprint)
        if space is None or not self._has(space, names):
            return np.full(len(names), RecordOutcome.MISSING, np.uint8)
        found = self.cache.lookup(space.number, names.group, names.hashes)
        if not found.all():
            found = found | self._loop.find_below(names)
        return np.where(found, np.uint8(RecordOutcome.FOUND), np.uint8(RecordOutcome.MISSING))

    def acquire(self, names: RecordNames, record_bytes: int, *, wait_s: float = 0.0) -> Held:
        """Leases records until `release`. `wait_s`: how long to wait for those in slower tiers."""
        space = self._spaces.find(names.fingerprint)
        group = None if space is None else space.find_group(names.group, record_bytes)
        if space is None or group is None or names.shard >= group.shards:
            return _hold_nothing(len(names))
        found = self.cache.lookup(space.number, names.group, names.hashes)
        if wait_s and not found.all():
            below = ~found & self._loop.find_below(names)
            if below.any():
                self._loop.bring(space, names.group, choose_rows(names.hashes, below), wait_s)
                found = self.cache.lookup(space.number, names.group, names.hashes)
        for _ in range(_LOOKS):
            if not found.any():
                break
            acquired = self.cache.acquire_entries(
                self._session, space.number, names.group, choose_rows(names.hashes, found), shards=(names.shard,)
            )
            if acquired.is_hit:
                leased = acquired.groups[names.group]
                slots = self.cache.pointers(leased.addresses) + np.uint64(names.shard * record_bytes)
                return Held(found=found, slots=slots, digests=leased.digests[0], lease=acquired.lease)
            found = self.cache.lookup(space.number, names.group, names.hashes)
        return _hold_nothing(len(names))

    def release(self, held: Held) -> None:
        if held.lease is not None:
            self.cache.release(self._session, held.lease)

    def reserve(self, names: RecordNames, record_bytes: int) -> Room | None:
        """Reserves slots for records that are not there yet. None: the identity is not known here, or is another
        one."""
        space = self._spaces.find(names.fingerprint)
        group = None if space is None else space.find_group(names.group, record_bytes)
        if space is None or group is None or names.shard >= group.shards:
            return None
        if group.shards > 1:
            return self._reserve_shard(space, names, record_bytes)
        got = self.cache.reserve(self._session, space.number, names.group, hashes=names.hashes)
        if len(got) < len(names):
            self.cache.abort(self._session, got.tickets)
            return self._refuse(space, names)
        wanted = got.tickets != 0
        return Room(
            space=space,
            outcomes=np.where(wanted, np.uint8(0), np.uint8(RecordOutcome.WRITTEN)),
            wanted=wanted,
            slots=self.cache.pointers(got.addresses[wanted]),
            tickets=got.tickets[wanted],
        )

    def commit(
        self, room: Room, names: RecordNames, *, claimed: Digests, found: Digests, parents: bytes
    ) -> npt.NDArray[np.uint8]:
        """Publishes records, and returns outcomes of all. Of those that were wanted, `claimed` are the digests that
        they should have, and `found` those of the bytes that have come."""
        outcomes = room.outcomes.copy()
        at = np.flatnonzero(room.wanted)
        is_good = claimed == found
        outcomes[at[~is_good]] = RecordOutcome.DAMAGED
        self._give_back(room, names, ~is_good)
        if not is_good.any():
            return outcomes
        rows = as_rows(names.hashes)[at[is_good]]
        before = as_rows(parents)[at[is_good]]
        ended = self.cache.commit(
            self._session,
            room.space.number,
            names.group,
            room.tickets[is_good],
            hashes=rows.tobytes(),
            parents=before.tobytes(),
            digests=np.ascontiguousarray(found[is_good]),
            shard=names.shard,
        )
        is_stored = _IS_STORED[ended]
        outcomes[at[is_good]] = np.where(is_stored, np.uint8(RecordOutcome.WRITTEN), np.uint8(RecordOutcome.FAILED))
        self._end_move(room, names, is_good, is_whole=ended != CommitOutcome.INCOMPLETE)
        is_new = ended == CommitOutcome.READABLE
        if is_new.any():
            stored = StoredBlocks(names.group, rows[is_new].tobytes(), before[is_new].tobytes())
            self._loop.tell_stored(room.space, stored)
        return outcomes

    def abort(self, room: Room, names: RecordNames) -> None:
        """Gives back the slots: the wanted records have not come."""
        self._give_back(room, names, np.ones(len(room.tickets), np.bool_))

    def remove(self, names: RecordNames, *, wait_s: float) -> npt.NDArray[np.uint8]:
        """Removes blocks as a whole: one without one of its shards is of no use. Returns REMOVED, MISSING, or FAILED if
        they may come back."""
        space = self._spaces.find(names.fingerprint)
        if space is None or not self._has(space, names):
            return np.full(len(names), RecordOutcome.MISSING, np.uint8)
        was_there = self.cache.lookup(space.number, names.group, names.hashes)
        was_there = was_there | self._loop.find_below(names)
        self.cache.invalidate(space.number, names.group, names.hashes)
        if not self._loop.remove(space, names.group, names.hashes, wait_s):
            return np.full(len(names), RecordOutcome.FAILED, np.uint8)
        return np.where(was_there, np.uint8(RecordOutcome.REMOVED), np.uint8(RecordOutcome.MISSING))

    def tick(self) -> None:
        """Gives up blocks whose other shards have not come. The server calls it now and then."""
        now_s = self._clock()
        with self._lock:
            old = [key for key, one in self._staged.items() if now_s - one.touched_s > STAGED_S and not one.moving]
            tickets = [self._staged.pop(key).ticket for key in old]
        if tickets:
            self.cache.abort(self._session, np.array(tickets, np.uint64))

    # ---- blocks of several shards ----

    def _reserve_shard(self, space: PeerSpace, names: RecordNames, record_bytes: int) -> Room:
        """Reserves slots for one shard. One slot serves all shards of a block, which come one by one."""
        count, now_s = len(names), self._clock()
        outcomes = np.zeros(count, np.uint8)
        slots, tickets = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        with self._lock:
            is_there = self.cache.lookup(space.number, names.group, names.hashes)
            outcomes[is_there] = RecordOutcome.WRITTEN
            keys = [self._key(space, names, at) for at in range(count)]
            new = list({keys[at]: at for at in np.flatnonzero(~is_there) if keys[at] not in self._staged}.values())
            if len(self._staged) + len(new) > STAGED_LIMIT or not self._stage(space, names, keys, new, now_s):
                return self._refuse(space, names)
            for at in np.flatnonzero(~is_there):
                staged = self._staged.get(keys[at])
                if staged is None or names.shard in staged.shards:
                    # Another link brings this very shard.
                    outcomes[at] = RecordOutcome.WRITTEN
                    continue
                staged.shards.add(names.shard)
                staged.moving.add(names.shard)
                staged.touched_s = now_s
                slots[at], tickets[at] = staged.slot + names.shard * record_bytes, staged.ticket
        wanted = outcomes == 0
        return Room(space=space, outcomes=outcomes, wanted=wanted, slots=slots[wanted], tickets=tickets[wanted])

    def _stage(
        self, space: PeerSpace, names: RecordNames, keys: list[tuple[int, int, bytes]], new: list[int], now_s: float
    ) -> bool:
        """Stages blocks until all of their shards are there. False: there is no room for them."""
        if not new:
            return True
        hashes = b"".join(keys[at][2] for at in new)
        got = self.cache.reserve(self._session, space.number, names.group, hashes=hashes)
        if len(got) < len(new):
            self.cache.abort(self._session, got.tickets)
            return False
        pointers = self.cache.pointers(got.addresses)
        for at, ticket, slot in zip(new, got.tickets.tolist(), pointers.tolist(), strict=True):
            if ticket:
                self._staged[keys[at]] = _Staged(ticket, slot, now_s)
        return True

    def _give_back(self, room: Room, names: RecordNames, bad: npt.NDArray[np.bool_]) -> None:
        """Gives back the slots of these; where others write to the same slot, only this shard."""
        if not bad.any():
            return
        if not self._is_sharded(room.space, names.group):
            self.cache.abort(self._session, room.tickets[bad])
            return
        with self._lock:
            for staged in self._list_staged(room, names, bad):
                if staged is not None:
                    staged.shards.discard(names.shard)
                    staged.moving.discard(names.shard)

    def _end_move(
        self, room: Room, names: RecordNames, good: npt.NDArray[np.bool_], *, is_whole: npt.NDArray[np.bool_]
    ) -> None:
        """Ends the move of the good ones. A block that is whole, or was stored by another writer, is not staged any
        more."""
        if not self._is_sharded(room.space, names.group):
            return
        at = np.flatnonzero(room.wanted)[good]
        with self._lock:
            for place, staged, is_over in zip(at, self._list_staged(room, names, good), is_whole, strict=True):
                if staged is not None:
                    staged.moving.discard(names.shard)
                    if is_over:
                        del self._staged[self._key(room.space, names, int(place))]

    def _list_staged(self, room: Room, names: RecordNames, chosen: npt.NDArray[np.bool_]) -> list[_Staged | None]:
        """Returns the staged block of each chosen record that was wanted. None: it is not staged, or with a new
        ticket."""
        at = np.flatnonzero(room.wanted)[chosen]
        found = [self._staged.get(self._key(room.space, names, int(one))) for one in at]
        tickets = room.tickets[chosen].tolist()
        return [
            staged if staged is not None and staged.ticket == ticket else None
            for staged, ticket in zip(found, tickets, strict=True)
        ]

    def _is_sharded(self, space: PeerSpace, group: int) -> bool:
        return space.geometry.groups[group].shards > 1

    def _has(self, space: PeerSpace, names: RecordNames) -> bool:
        return names.group < len(space.geometry.groups) and names.shard < space.geometry.groups[names.group].shards

    def _key(self, space: PeerSpace, names: RecordNames, at: int) -> tuple[int, int, bytes]:
        return space.number, names.group, names.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]

    def _refuse(self, space: PeerSpace, names: RecordNames) -> Room:
        """Makes the answer for records for which there is no room."""
        return Room(
            space=space,
            outcomes=np.full(len(names), RecordOutcome.FAILED, np.uint8),
            wanted=np.zeros(len(names), np.bool_),
            slots=np.empty(0, np.uint64),
            tickets=np.empty(0, np.uint64),
        )


def _hold_nothing(count: int) -> Held:
    return Held(found=np.zeros(count, np.bool_), slots=np.empty(0, np.uint64), digests=np.empty(0, np.uint64))
