"""The native cache under a schedule: real shared memory, and a real process for each simulated one.

The wrapper keeps count of what is reserved and leased by what the cache answers; the cache's own counts must agree.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.cache import (
    Acquired,
    CacheFiles,
    CacheSettings,
    CommitOutcome,
    IndexReader,
    LeaseId,
    LocalCache,
    Reservation,
    SegmentMap,
    SessionId,
)
from tests.kit.cache.cache_model import KIB, record_pattern
from tests.simulation.model_entries import PIECES, Tag

RECORD_BYTES = 8 * KIB
_PIECE_BYTES = RECORD_BYTES // PIECES
_SLOTS = 24
_STALE, _INCOMPLETE = CommitOutcome.STALE, CommitOutcome.INCOMPLETE


class Sleepers:
    """Processes that do nothing but live until they are told otherwise."""

    def __init__(self) -> None:
        self._by_number: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, int] = {}
        """Their pidfds."""

    def open_pidfd(self, number: int) -> int:
        """Of the one with this number, which is started if need be, or has ended by now."""
        if number in self._ended:
            return os.dup(self._ended[number])
        if number not in self._by_number:
            self._by_number[number] = subprocess.Popen(["sleep", "600"])
        return os.pidfd_open(self._by_number[number].pid)

    def end(self, number: int) -> None:
        sleeper = self._by_number.pop(number, None)
        if sleeper is not None:
            self._ended[number] = os.pidfd_open(sleeper.pid)
            sleeper.send_signal(signal.SIGKILL)
            sleeper.wait()

    def close(self) -> None:
        for number in list(self._by_number):
            self.end(number)
        for pidfd in self._ended.values():
            os.close(pidfd)


class RealMemory:
    """One cache's memory, for as long as any process has it."""

    def __init__(self, number: int, cache: LocalCache, segment_bytes: int) -> None:
        self.number = number
        self.has_owner = True
        self.members_of: dict[int, set[int]] = {}
        """Processes that a session ever had."""
        self.reserved: dict[int, int] = {}
        """Tickets, with their sessions."""
        self.leased: dict[int, int] = {}
        """Leases, with their sessions."""
        self.names: set[tuple[int, int, bytes]] = set()
        """Names that were ever published."""
        files = cache.files
        self.files = CacheFiles(
            lock=os.dup(files.lock), index=os.dup(files.index), segments=tuple(map(os.dup, files.segments))
        )
        self._index = IndexReader(cache.open_index())
        self._segments = SegmentMap([os.dup(file) for file in files.segments], segment_bytes)
        self.lookup = self._index.lookup
        self.find_boundary = self._index.find_boundary

    def __len__(self) -> int:
        return _SLOTS

    @property
    def ready_bytes(self) -> int:
        return self._index.ready_bytes

    @property
    def leaving_from(self) -> int:
        """Returns 0: no memory is given back."""
        return 0

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    def close(self) -> None:
        for file in (self.files.lock, self.files.index, *self.files.segments):
            os.close(file)

    def write(self, address: int, shard: int, piece: int, tag: Tag) -> None:
        self._view(address, shard, piece)[:] = _bytes_of(tag, piece)

    def holds(self, address: int, shard: int, piece: int, tag: Tag) -> bool:
        return np.array_equal(self._view(address, shard, piece), _bytes_of(tag, piece))

    def is_reserved(self, ticket: int) -> bool:
        return ticket in self.reserved

    def readable_names(self) -> set[tuple[int, int, bytes]]:
        return {key for key in self.names if self.lookup(key[0], key[1], key[2])[0]}

    def held_leases(self) -> Iterator[tuple[int, int]]:
        return iter(self.leased.items())

    def reservations(self) -> Iterator[tuple[int, int]]:
        return iter(self.reserved.items())

    def members(self, session: int) -> set[int]:
        return self.members_of.get(session, set())

    def _view(self, address: int, shard: int, piece: int) -> npt.NDArray[np.uint8]:
        return self._segments.view(address + shard * RECORD_BYTES + piece * _PIECE_BYTES, _PIECE_BYTES)


class RealCache(LocalCache):
    """A server's use of it."""

    memory: RealMemory
    sleepers: Sleepers

    @classmethod
    def make(cls, number: int, shards: int, sleepers: Sleepers) -> RealCache:
        memory_bytes = _SLOTS * shards * RECORD_BYTES
        settings = CacheSettings(
            memory_bytes=memory_bytes,
            segment_bytes=memory_bytes,
            extent_bytes=shards * RECORD_BYTES,
            entry_limit=256,
            policy="lru",
        )
        cache = cls.create(settings)
        cache.memory, cache.sleepers = RealMemory(number, cache, memory_bytes), sleepers
        return cache

    @classmethod
    def take_over(cls, memory: RealMemory, sleepers: Sleepers) -> RealCache:
        files = memory.files
        taken = CacheFiles(
            lock=os.dup(files.lock), index=os.dup(files.index), segments=tuple(map(os.dup, files.segments))
        )
        cache = cls.adopt(taken, CacheSettings(memory_bytes=0, policy="lru"))
        memory.has_owner = True
        cache.memory, cache.sleepers = memory, sleepers
        cache.agree()
        return cache

    def close(self) -> None:
        super().close()
        self.memory.has_owner = False

    def agree(self) -> None:
        """Checks that the cache's counts agree with its answers."""
        stats, memory = self.stats, self.memory
        assert stats.reserved == len(memory.reserved), f"{stats.reserved} reserved, {len(memory.reserved)} were given"
        assert stats.leases == len(memory.leased), f"{stats.leases} leases, {len(memory.leased)} were given"

    def add_process(self, session: SessionId, *, pid: int | None = None, pidfd: int | None = None) -> None:
        assert pidfd is not None
        super().add_process(session, pidfd=self.sleepers.open_pidfd(pidfd))
        self.memory.members_of.setdefault(session, set()).add(pidfd)

    def reclaim_ended(self) -> int:
        count = super().reclaim_ended()
        if count:
            memory = self.memory
            ended = {session for session in memory.members_of if not self.held_bytes(SessionId(session))}
            memory.reserved = {ticket: one for ticket, one in memory.reserved.items() if one not in ended}
            memory.leased = {lease: one for lease, one in memory.leased.items() if one not in ended}
        self.agree()
        return count

    def acquire(self, session: SessionId, *arguments: Any, **options: Any) -> Acquired:
        return self._keep_lease(session, super().acquire(session, *arguments, **options))

    def acquire_entries(self, session: SessionId, *arguments: Any, **options: Any) -> Acquired:
        return self._keep_lease(session, super().acquire_entries(session, *arguments, **options))

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        is_released = super().release(session, lease)
        assert is_released == (self.memory.leased.get(lease) == session)
        if is_released:
            del self.memory.leased[lease]
        self.agree()
        return is_released

    def reserve(self, session: SessionId, *arguments: Any, **options: Any) -> Reservation:
        found = super().reserve(session, *arguments, **options)
        self.memory.reserved |= {ticket: session for ticket in found.tickets.tolist() if ticket}
        self.agree()
        return found

    def commit(self, session: SessionId, name_space: int, group: int, tickets: Any, **options: Any) -> Any:
        outcomes = super().commit(session, name_space, group, tickets, **options)
        for at, (ticket, outcome) in enumerate(zip(tickets.tolist(), outcomes.tolist(), strict=True)):
            if outcome not in (_STALE, _INCOMPLETE):
                assert self.memory.reserved.pop(ticket) == session
                self.memory.names.add((name_space, group, bytes(options["hashes"][32 * at : 32 * at + 32])))
        self.agree()
        return outcomes

    def abort(self, session: SessionId, tickets: Any) -> int:
        ours = [ticket for ticket in tickets.tolist() if self.memory.reserved.get(ticket) == session]
        count = super().abort(session, tickets)
        for ticket in ours:
            del self.memory.reserved[ticket]
        assert count == len(ours)
        self.agree()
        return count

    def _keep_lease(self, session: SessionId, found: Acquired) -> Acquired:
        if found.lease:
            self.memory.leased[found.lease] = session
        self.agree()
        return found


def _bytes_of(tag: Tag, piece: int) -> npt.NDArray[np.uint8]:
    identity, name, shard = tag
    return record_pattern((identity[0], piece), name, shard, _PIECE_BYTES)
