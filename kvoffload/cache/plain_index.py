"""Which records exist, who uses them, and which slot holds each: the cache's verbs over a dictionary.

    reserve ──► RESERVED ──commit──► READABLE ──evict, invalidate, clear──► gone
                    └────abort───────────────────────────────────────────► gone

A readable entry that is leased stays where it is until its last lease is released, whatever happens to its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import NamedTuple

from kvoffload.types import BlockHash


class EntryKey(NamedTuple):
    """One block's records in one group. The namespace is the index itself: it serves one identity."""

    group: int
    block_hash: BlockHash


class State(Enum):
    """What may be done with an entry."""

    RESERVED = "reserved"
    READABLE = "readable"


@dataclass(eq=False)
class _Entry:
    key: EntryKey
    slot: int
    state: State = State.RESERVED
    leases: int = 0


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to read these slots. Only `PlainIndex.release` ends it; no timer does."""

    keys: tuple[EntryKey, ...]
    slots: tuple[int, ...]
    _entries: tuple[_Entry, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class IndexStats:
    """Counts at one moment; the last two since the index was made."""

    entries: int
    used_bytes: int
    leased_entries: int
    reserved_entries: int
    evicted: int
    refused: int


class PlainIndex:
    """Owned by the thread that plans: the engine's scheduler. Never blocks.

    The bytes lie elsewhere, under slot numbers that are never used twice. Whoever holds them asks `take_drops` which
    slots are free of use, and forgets those.
    """

    def __init__(self, *, record_bytes: Sequence[int], capacity_bytes: int) -> None:
        """`record_bytes` per group. A record that does not fit the capacity is refused by every `reserve`."""
        self._record_bytes = tuple(record_bytes)
        self._capacity_bytes = capacity_bytes
        self._by_key: dict[EntryKey, _Entry] = {}
        self._by_slot: dict[int, _Entry] = {}
        # Readable and not leased, least recently used first: what may be evicted.
        self._idle: OrderedDict[int, _Entry] = OrderedDict()
        self._slots = count()
        self._drops: list[int] = []
        self._used_bytes = 0
        self._idle_bytes = 0
        self._leased = 0
        self._evicted = 0
        self._refused = 0
        self.version = 0
        """Grows whenever an answer of `lookup` may have changed."""

    def lookup(self, key: EntryKey) -> bool:
        """Whether the entry can be acquired now. Changes nothing."""
        entry = self._by_key.get(key)
        return entry is not None and entry.state is State.READABLE

    def holds(self, key: EntryKey) -> bool:
        """Whether saving it again would be useless: readable, or on its way."""
        return key in self._by_key

    def acquire(self, keys: Iterable[EntryKey]) -> Lease | None:
        """A lease on all of them, or None when one is not readable."""
        wanted = tuple(keys)
        entries = tuple(entry for key in wanted if (entry := self._by_key.get(key)) is not None)
        if len(entries) != len(wanted) or any(entry.state is not State.READABLE for entry in entries):
            return None
        for entry in entries:
            self._end_idle(entry)
            self._leased += entry.leases == 0
            entry.leases += 1
        return Lease(wanted, tuple(entry.slot for entry in entries), entries)

    def release(self, lease: Lease) -> None:
        """Once per lease. Blocks deep in a prefix become the older ones, so that parents outlive children."""
        for entry in reversed(lease._entries):
            assert entry.leases > 0, "a lease was released twice"
            entry.leases -= 1
            if entry.leases:
                continue
            self._leased -= 1
            if self._is_named(entry):
                self._begin_idle(entry)
            else:
                self._free(entry)

    def reserve(self, key: EntryKey) -> int | None:
        """A slot to write to, or None: it exists already, or nothing more can be evicted."""
        if key in self._by_key:
            return None
        size_bytes = self._record_bytes[key.group]
        if not self._evict_until_free(size_bytes):
            self._refused += 1
            return None
        entry = _Entry(key, next(self._slots))
        self._by_key[key] = self._by_slot[entry.slot] = entry
        self._used_bytes += size_bytes
        return entry.slot

    def commit(self, slot: int) -> bool:
        """Make a written slot readable. False when it was cleared meanwhile; then its bytes are dropped."""
        entry = self._by_slot[slot]
        assert entry.state is State.RESERVED, "a slot was committed twice"
        entry.state = State.READABLE
        if not self._is_named(entry):
            self._free(entry)
            return False
        self._begin_idle(entry)
        self.version += 1
        return True

    def abort(self, slot: int) -> None:
        """Give a reserved slot back, written or not. Nobody may write to it from now on."""
        entry = self._by_slot[slot]
        assert entry.state is State.RESERVED, "a committed slot was aborted"
        if self._is_named(entry):
            del self._by_key[entry.key]
        self._free(entry)

    def invalidate(self, keys: Iterable[EntryKey]) -> None:
        """Forget readable entries whose bytes are not to be trusted. Leases on them stay good until released."""
        for key in keys:
            entry = self._by_key.get(key)
            if entry is not None and entry.state is State.READABLE:
                self._remove(entry)

    def clear(self) -> None:
        """Forget everything, reserved entries too: what they are being filled with is not wanted any more."""
        for entry in list(self._by_key.values()):
            self._remove(entry)

    def take_drops(self) -> tuple[int, ...]:
        """Slots that nobody will ask for again, each told once."""
        drops, self._drops = tuple(self._drops), []
        return drops

    @property
    def stats(self) -> IndexStats:
        """Counts at this moment."""
        reserved = sum(entry.state is State.RESERVED for entry in self._by_slot.values())
        return IndexStats(
            entries=len(self._by_slot) - reserved,
            used_bytes=self._used_bytes,
            leased_entries=self._leased,
            reserved_entries=reserved,
            evicted=self._evicted,
            refused=self._refused,
        )

    def _evict_until_free(self, size_bytes: int) -> bool:
        if self._used_bytes - self._idle_bytes + size_bytes > self._capacity_bytes:
            return False  # before anything is evicted for it
        while self._used_bytes + size_bytes > self._capacity_bytes:
            self._remove(next(iter(self._idle.values())))
            self._evicted += 1
        return True

    def _begin_idle(self, entry: _Entry) -> None:
        self._idle[entry.slot] = entry
        self._idle_bytes += self._record_bytes[entry.key.group]

    def _end_idle(self, entry: _Entry) -> None:
        if self._idle.pop(entry.slot, None) is not None:
            self._idle_bytes -= self._record_bytes[entry.key.group]

    def _is_named(self, entry: _Entry) -> bool:
        return self._by_key.get(entry.key) is entry

    def _remove(self, entry: _Entry) -> None:
        """Take the name away. The slot stays while somebody reads it or is writing to it."""
        del self._by_key[entry.key]
        self._end_idle(entry)
        self.version += 1
        if entry.state is State.READABLE and not entry.leases:
            self._free(entry)

    def _free(self, entry: _Entry) -> None:
        del self._by_slot[entry.slot]
        self._drops.append(entry.slot)
        self._used_bytes -= self._record_bytes[entry.key.group]
