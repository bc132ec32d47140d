"""A cache's memory and its server's use of it, in plain Python: what `LocalCache` does, as far as engines can tell.

The memory outlives the cache that serves it, like the native one: sessions, leases, reservations and readable entries
are found in it by the next cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import (
    NO_ADDRESS,
    NO_LIMIT,
    Acquired,
    AcquireOutcome,
    Ask,
    CacheGeometry,
    CacheStats,
    CommitOutcome,
    LeasedGroup,
    LeaseFor,
    LeaseId,
    ListedBlocks,
    MemoryCurve,
    Reservation,
    Residence,
    SessionId,
)
from tests.simulation.model_entries import SLOT_BYTES, Entry, Session, Tag, split


class ModelMemory:
    """The shared memory of a cache. Its user is the process that has its number."""

    def __init__(self, number: int, slots: int) -> None:
        self.number = number
        self.entries = [Entry(place) for place in range(slots)]
        self.pieces: dict[tuple[int, int, int], Tag] = {}
        """By slot, shard and piece."""
        self.readable: dict[tuple[int, int, bytes], Entry] = {}
        self.used: set[tuple[int, int, bytes]] = set()
        self.leases: dict[int, tuple[int, list[Entry]]] = {}
        """By number: the session, and what it reads."""
        self.sessions: dict[int, Session] = {}
        self.spaces: list[tuple[bytes, CacheGeometry]] = []
        self.has_owner = True
        self.clock = 0
        self.last_lease = 0
        self.last_session = 0

    def __len__(self) -> int:
        """Returns its size in slots."""
        return len(self.entries)

    # ---- what engines do with it: without a server ----

    @property
    def ready_bytes(self) -> int:
        return len(self.entries) * SLOT_BYTES

    @property
    def leaving_from(self) -> int:
        """Returns 0: no memory is given back."""
        return 0

    @property
    def used_bytes(self) -> int:
        return SLOT_BYTES * sum(entry.state != "free" for entry in self.entries)

    def lookup(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return np.array([(name_space, group, name) in self.readable for name in split(hashes)], np.bool_)

    def find_boundary(self, name_space: int, ask: Ask) -> int:
        """Of a geometry with one group, of which each block has one hash."""
        if name_space >= len(self.spaces):
            return ask.local
        size = self.spaces[name_space][1].hash_block_size
        end = ask.local // size
        for name in split(ask.chain)[end : ask.limit // size]:
            if (name_space, 0, name) not in self.readable:
                break
            end += 1
        return end * size

    def write(self, address: int, shard: int, piece: int, tag: Tag) -> None:
        self.pieces[address // SLOT_BYTES, shard, piece] = tag

    def holds(self, address: int, shard: int, piece: int, tag: Tag) -> bool:
        return self.pieces.get((address // SLOT_BYTES, shard, piece)) == tag

    def is_reserved(self, ticket: int) -> bool:
        entry = self.entries[(ticket & 0xFFFF) - 1]
        return entry.state == "reserved" and entry.ticket == ticket

    # ---- what a test wants to know ----

    def readable_names(self) -> set[tuple[int, int, bytes]]:
        return set(self.readable)

    def held_leases(self) -> Iterator[tuple[int, int]]:
        """Returns the held leases: number and session."""
        return ((number, session) for number, (session, _) in self.leases.items())

    def reservations(self) -> Iterator[tuple[int, int]]:
        """Returns the reservations: ticket and session."""
        return ((entry.ticket, entry.session) for entry in self.entries if entry.state == "reserved")

    def members(self, session: int) -> set[int]:
        """Returns processes; none of a session that has ended."""
        return self.sessions[session].members if session in self.sessions else set()


class ModelCache:
    """A server's use of a memory: a `LocalCache`. `has_exited` says it of a process, whose pidfd is its number."""

    def __init__(self, memory: ModelMemory, has_exited: Callable[[int], bool]) -> None:
        self.memory = memory
        self._has_exited = has_exited

    @classmethod
    def adopt(cls, memory: ModelMemory, has_exited: Callable[[int], bool]) -> ModelCache:
        assert not memory.has_owner
        memory.has_owner = True
        for session in memory.sessions.values():
            session.members = {member for member in session.members if not has_exited(member)}
            session.is_open = session.is_ending = False
        return cls(memory, has_exited)

    def close(self) -> None:
        self.memory.has_owner = False

    # ---- sessions ----

    def open_namespace(self, fingerprint: Any, geometry: CacheGeometry) -> int:
        known = [name for name, _ in self.memory.spaces]
        if fingerprint not in known:
            self.memory.spaces.append((bytes(fingerprint), geometry))
            return len(known)
        return known.index(fingerprint)

    def open_tenant(self, name: str, *, quota_bytes: int = 0) -> int:
        return 0

    def open_session(self, *, held_limit_bytes: int = NO_LIMIT, owner: int | None = None) -> SessionId:
        self.memory.last_session += 1
        self.memory.sessions[self.memory.last_session] = Session()
        return SessionId(self.memory.last_session)

    def held_bytes(self, session: SessionId) -> int:
        leased = sum(len(entries) for of, entries in self.memory.leases.values() if of == session)
        return SLOT_BYTES * (leased + sum(of == session for _, of in self.memory.reservations()))

    def add_process(self, session: SessionId, *, pidfd: int) -> None:
        found = self.memory.sessions.get(session)
        if found is None or not found.is_open or found.is_ending:
            raise ValueError(f"no session {session} is open")
        found.members.add(pidfd)

    def quarantine_session(self, session: SessionId) -> bool:
        found = self.memory.sessions.get(session)
        if found is not None:
            found.is_open = False
        return found is not None

    def reopen_session(self, session: SessionId, *, owner: int | None = None) -> bool:
        found = self.memory.sessions.get(session)
        if found is None or found.is_ending:
            return False
        found.members = {member for member in found.members if not self._has_exited(member)}
        found.is_open = True
        return True

    def reclaim_ended(self) -> int:
        ended = []
        for number, session in self.memory.sessions.items():
            may_have_more = not session.members and session.is_open
            if session.is_ending or (not may_have_more and all(map(self._has_exited, session.members))):
                session.is_ending = True
                ended.append(number)
        for number in ended:
            for lease in [lease for lease, (session, _) in self.memory.leases.items() if session == number]:
                self.release(SessionId(number), LeaseId(lease))
            for entry in self.memory.entries:
                if entry.state == "reserved" and entry.session == number:
                    self._free(entry)
            del self.memory.sessions[number]
        return len(ended)

    # ---- blocks ----

    def lookup(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return self.memory.lookup(name_space, group, hashes)

    def acquire(self, session: SessionId, name_space: int, ask: Ask) -> Acquired:
        local = ask.local
        boundary = self.memory.find_boundary(name_space, ask)
        if boundary == local:
            return Acquired(AcquireOutcome.MISS, local, LeaseId(0), ())
        size = self.memory.spaces[name_space][1].hash_block_size
        names = split(ask.chain)[local // size : boundary // size]
        self.memory.used |= {(name_space, 0, name) for name in names}
        return self._lease(session, [(name_space, 0, name) for name in names], boundary, local // size, len(ask.shards))

    def acquire_entries(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        hashes: Buffer,
        *,
        shards: Sequence[int] = (),
        lease_for: LeaseFor = LeaseFor.USE,
    ) -> Acquired:
        keys = [(name_space, group, name) for name in split(hashes)]
        if not keys or not all(key in self.memory.readable for key in keys):
            return Acquired(AcquireOutcome.MISS, 0, LeaseId(0), ())
        if lease_for is LeaseFor.USE:
            self.memory.used |= set(keys)
        return self._lease(session, keys, 0, 0, len(shards))

    def find_used(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return np.array([(name_space, group, name) in self.memory.used for name in split(hashes)], np.bool_)

    def pointers(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return addresses

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        owner, entries = self.memory.leases.get(lease, (0, []))
        if owner != session or not lease:
            return False
        del self.memory.leases[lease]
        for entry in entries:
            entry.leases -= 1
            if not entry.leases and entry.state == "quarantined":
                self._free(entry)
        return True

    def reserve(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        *,
        count: int = 0,
        hashes: Buffer | None = None,
        tenant: int = 0,
    ) -> Reservation:
        names: list[bytes | None] = [None] * count if hashes is None else list(split(hashes))
        tickets, addresses = [], []
        for name in names:
            if name is not None and (name_space, group, name) in self.memory.readable:
                tickets.append(0)
                addresses.append(NO_ADDRESS)
                continue
            entry = self._find_room() if self._may_have_more(session) else None
            if entry is None:
                break
            entry.state, entry.session, entry.committed = "reserved", session, 0
            entry.space, entry.key = (name_space, group), None
            tickets.append(entry.ticket)
            addresses.append(entry.place * SLOT_BYTES)
        return Reservation(np.array(tickets, np.uint64), np.array(addresses, np.uint64))

    def commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: npt.NDArray[np.uint64],
        *,
        hashes: Buffer,
        parents: Buffer | None = None,
        digests: npt.NDArray[np.uint64] | None = None,
        shard: int = 0,
        tenant: int | None = None,
    ) -> npt.NDArray[np.uint8]:
        names = split(hashes)
        outcomes = [
            self._commit_one(session, (name_space, group, name), ticket, shard)
            for ticket, name in zip(tickets.tolist(), names, strict=True)
        ]
        return np.array(outcomes, np.uint8)

    def abort(self, session: SessionId, tickets: npt.NDArray[np.uint64]) -> int:
        found = [entry for ticket in tickets.tolist() if (entry := self._reserved(session, ticket)) is not None]
        for entry in found:
            self._free(entry)
        return len(found)

    def invalidate(self, name_space: int, group: int, hashes: Buffer) -> int:
        return sum(self._remove((name_space, group, name)) for name in split(hashes))

    # ---- writes, each by the thread that asks for it ----

    def leave_reserve(
        self, session: SessionId, name_space: int, group: int, *, hashes: Buffer
    ) -> Callable[[], Reservation | None]:
        found = self.reserve(session, name_space, group, hashes=hashes)
        return lambda: found

    def leave_commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: npt.NDArray[np.uint64],
        *,
        hashes: Buffer,
        parents: Buffer,
        digests: npt.NDArray[np.uint64],
        shard: int = 0,
    ) -> Callable[[], npt.NDArray[np.uint8] | None]:
        outcomes = self.commit(session, name_space, group, tickets, hashes=hashes, parents=parents, shard=shard)
        return lambda: outcomes

    def leave_abort(self, session: SessionId, tickets: npt.NDArray[np.uint64]) -> None:
        self.abort(session, tickets)

    def leave_invalidate(self, name_space: int, group: int, hashes: Buffer) -> None:
        self.invalidate(name_space, group, hashes)

    def list_blocks(self, name_space: int, *, first: int = 0, limit: int) -> ListedBlocks:
        """All at once."""
        there = [(group, name) for of, group, name in self.memory.readable if of == name_space]
        hashes = b"".join(name for _, name in there)
        return ListedBlocks(
            next=0, groups=np.array([group for group, _ in there], np.uint64), hashes=hashes, parents=hashes
        )

    def leave_tier_notes(self, name_space: int, group: int, hashes: Buffer, has: npt.NDArray[np.bool_]) -> None:
        assert len(has) == len(list(split(hashes)))

    @property
    def memory_curve(self) -> MemoryCurve:
        return MemoryCurve()

    @property
    def is_evicting(self) -> bool:
        return False

    def leave_evict(self, name_spaces: Iterable[int]) -> bool:
        for name_space in name_spaces:
            self.clear(name_space)
        return True

    def clear(self, name_space: int) -> int:
        return sum(self._remove(key) for key in list(self.memory.readable) if key[0] == name_space)

    # ---- parts that this simulation does not use: hints, and subscribers of events ----

    @property
    def without_room(self) -> int:
        return 0

    @property
    def ready_bytes(self) -> int:
        return len(self.memory) * SLOT_BYTES

    def watch_removed(self, is_wanted: bool) -> None:
        assert not is_wanted

    @property
    def stats(self) -> CacheStats:
        states = [entry.state for entry in self.memory.entries]
        counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0) | {
            "capacity_bytes": len(self.memory) * SLOT_BYTES,
            "readable": states.count("readable"),
            "reserved": states.count("reserved"),
            "quarantined": states.count("quarantined"),
            "leases": len(self.memory.leases),
            "sessions": len(self.memory.sessions),
        }
        others = {"tenants": (), "places": (), "traffic": {}, "residence": Residence(), "memory_reason": ""}
        return CacheStats(**(counts | others))

    def used_by(self, name_space: int) -> int:
        return self.used_by_each().get(name_space, 0)

    def used_by_each(self) -> dict[int, int]:
        return {space: SLOT_BYTES for space, _, _ in self.memory.readable}

    # ---- inside ----

    def _may_have_more(self, session: SessionId) -> bool:
        found = self.memory.sessions.get(session)
        return found is not None and found.is_open and not found.is_ending

    def _lease(
        self, session: SessionId, keys: list[tuple[int, int, bytes]], boundary: int, first: int, shards: int
    ) -> Acquired:
        if not self._may_have_more(session):
            return Acquired(AcquireOutcome.OVER_LIMIT, 0, LeaseId(0), ())
        memory = self.memory
        entries = [memory.readable[key] for key in keys]
        memory.clock += 1
        memory.last_lease += 1
        for entry in entries:
            entry.leases += 1
            entry.touched = memory.clock
        memory.leases[memory.last_lease] = (session, entries)
        addresses = np.array([entry.place * SLOT_BYTES for entry in entries], np.uint64)
        group = LeasedGroup(first, addresses, np.ones((shards, len(entries)), np.uint64))
        return Acquired(AcquireOutcome.HIT, boundary, LeaseId(memory.last_lease), (group,))

    def _commit_one(self, session: SessionId, key: tuple[int, int, bytes], ticket: int, shard: int) -> CommitOutcome:
        entry = self._reserved(session, ticket) if self._may_have_more(session) else None
        if entry is None or entry.space != key[:2] or (entry.key is not None and entry.key != key):
            return CommitOutcome.STALE
        entry.key = key
        entry.committed |= 1 << shard
        shards = self.memory.spaces[key[0]][1].groups[key[1]].shards
        if entry.committed != (1 << shards) - 1:
            return CommitOutcome.INCOMPLETE
        if key in self.memory.readable:
            self._free(entry)
            return CommitOutcome.DUPLICATE
        self.memory.clock += 1
        entry.state, entry.touched = "readable", self.memory.clock
        self.memory.readable[key] = entry
        return CommitOutcome.READABLE

    def _reserved(self, session: SessionId, ticket: int) -> Entry | None:
        entries = self.memory.entries
        if session not in self.memory.sessions or not 0 < ticket & 0xFFFF <= len(entries):
            return None
        entry = entries[(ticket & 0xFFFF) - 1]
        return entry if entry.state == "reserved" and entry.ticket == ticket and entry.session == session else None

    def _find_room(self) -> Entry | None:
        for entry in self.memory.entries:
            if entry.state == "free":
                return entry
        victims = [entry for entry in self.memory.readable.values() if not entry.leases]
        if not victims:
            return None
        victim = min(victims, key=lambda entry: entry.touched)
        assert victim.key is not None
        self._remove(victim.key)
        return victim

    def _remove(self, key: tuple[int, int, bytes]) -> bool:
        entry = self.memory.readable.pop(key, None)
        if entry is None:
            return False
        self.memory.clock += 1
        if entry.leases:
            entry.state = "quarantined"
        else:
            self._free(entry)
        return True

    def _free(self, entry: Entry) -> None:
        entry.generation += 1
        entry.state, entry.key, entry.session = "free", None, 0
