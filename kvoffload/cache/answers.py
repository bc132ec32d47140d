"""Answers of a cache. Misses and refusals are values here, not exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvoffload.types import AcquireOutcome

SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)

Addresses = npt.NDArray[np.uint64]
"""Addresses of slots, counted over all segments as if they lay one behind the other."""
Tickets = npt.NDArray[np.uint64]
"""Rights to write to reserved slots. 0 stands for a block that needs no saving."""

NO_ADDRESS = 2**64 - 1


class LeaseFor(IntEnum):
    """The purpose of a lease on blocks. Only use counts for policies, and as hits or misses."""

    USE = 0
    UPKEEP = 1
    """Their bytes are read all the same, and checked where they have to be."""
    KEEP = 2
    """The blocks should not be evicted. No byte is read: they are checked when they are acquired for use."""


class CommitOutcome(IntEnum):
    """The outcome of one committed record; the numbers are those in the array that `commit` returns."""

    READABLE = 0
    INCOMPLETE = 1
    """Other shards are awaited."""
    DUPLICATE = 2
    """Another writer's entry was first; the slot was taken back."""
    STALE = 3
    """The ticket is not valid (any more); nothing was changed."""
    REFUSED = 4
    """The index has no room for the name; the slot was taken back."""


class Leaving(IntEnum):
    """Why a block is not in memory any more."""

    EVICTED = 1
    UNTRUSTED = 2
    """Its bytes did not have their digest, or a caller invalidated it."""
    CLEARED = 3


@dataclass(frozen=True, kw_only=True)
class Departed:
    """Why and when a block left memory, as far as that is remembered."""

    why: Leaving
    seconds_ago: int
    missing_bytes: int
    """Approximate bytes of additional memory that would have kept the block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundEntries:
    """Those of `matches` entries that were wanted, in parallel columns."""

    matches: int
    hashes: bytes
    name_spaces: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.uint64]
    seconds: npt.NDArray[np.uint64]
    """Seconds since each was stored; 2^64 - 1: by a process before this one."""
    leases: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.uint64]
    used: npt.NDArray[np.uint64]
    """1: the entry was acquired for use since it was stored."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedBlocks:
    """Readable blocks of one identity, in parallel columns."""

    next: int
    """Where the listing goes on; 0: it is over."""
    groups: npt.NDArray[np.uint64]
    hashes: bytes
    parents: bytes
    """The blocks before them; zeros for none, the own name for one that is not readable any more, or not known."""


@dataclass(frozen=True, kw_only=True)
class RemovedBlocks:
    """Blocks that cannot be found any more, or could not at some moment since they were asked for."""

    parts: Sequence[tuple[int, int, bytes]]
    """Namespace, group and hashes."""
    lost: int
    """More blocks of which nothing else is known."""
    is_all: bool
    """Others have to be taken still, if not."""


@dataclass(frozen=True, kw_only=True)
class Residence:
    """Histogram of the seconds that evicted blocks were in memory: counts by bucket, the last for times longer than any
    bound."""

    bounds_s: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    sum_s: int = 0


@dataclass(frozen=True, eq=False)
class LeasedGroup:
    """Slots of the blocks from position `first` on."""

    first: int
    addresses: Addresses
    digests: npt.NDArray[np.uint64]
    """A row for each shard that was asked for; 0 is one that is not known."""


@dataclass(frozen=True, eq=False)
class Acquired:
    """The answer of `acquire`: with a lease if it is a hit. `boundary` is in tokens, `local` again where it is none."""

    outcome: AcquireOutcome
    boundary: int
    lease: LeaseId
    groups: tuple[LeasedGroup, ...]

    @property
    def is_hit(self) -> bool:
        return self.outcome is AcquireOutcome.HIT


@dataclass(frozen=True, eq=False)
class Reservation:
    """Slots to write to, in the order in which they were asked for; fewer where there is no room."""

    tickets: Tickets
    addresses: Addresses

    def __len__(self) -> int:
        return len(self.tickets)


@dataclass(frozen=True, kw_only=True)
class TenantUsage:
    """One tenant's part of the pool. A quota of 0: it has no share of its own. The one without a name comes first."""

    name: str
    quota_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlaceUsage:
    """One place of a slower tier, such as a disk's folder."""

    tier: str
    name: str
    state: str
    reason: str
    capacity_bytes: int
    used_bytes: int
    records: int
    coded_records: int = 0
    """Records that became shorter by a code when they were written there, or came from a peer in one, since the server
    has the place."""
    coded_bytes: int = 0
    """Bytes of these records as they are in memory."""
    coded_stored_bytes: int = 0
    """Bytes of these records as they were written or came."""


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Counts at one moment; those from `hits` on since the cache was made or adopted."""

    capacity_bytes: int
    used_bytes: int
    readable: int
    reserved: int
    quarantined: int
    leases: int
    sessions: int
    namespaces: int
    index_bytes: int
    hits: int
    misses: int
    refused: int
    duplicates: int
    evicted: int
    mismatches: int
    """Records whose bytes were not what their digest says."""
    moved_bytes: int
    lost_touches: int
    evicted_unused: int = 0
    """Evicted entries that had never been loaded."""
    tenants: tuple[TenantUsage, ...]
    places: tuple[PlaceUsage, ...] = ()
    """Usage of the slower tiers' places, as the server reports it."""
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Traffic of each slower tier: counts by name."""
    ready_bytes: int = 0
    """Bytes of the capacity that have their memory by now."""
    given_back_bytes: int = 0
    """Bytes that the pool has given back to the system so far."""
    memory_reason: str = ""
    """Why the pool is smaller than its full size, as metrics name it; empty: it is not, or nothing is known."""
    residence: Residence = field(default_factory=Residence)
    """How long evicted entries were in memory. A server reports it separately."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The hits that a pool of another size would have had."""

    memory: float
    """Memory as a multiple of the pool's: 0.5 is half of it."""
    hit_blocks: int
    hit_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """The hits to expect with less and with more memory. Blocks count as asked for if engines loaded them, or computed
    and saved them. Those of long ago count less."""

    asked_blocks: int = 0
    """Number of blocks asked for, in groups that keep prefixes."""
    asked_bytes: int = 0
    """Number of bytes asked for, in all groups."""
    one_in: int = 1
    """Sampling rate: one block in so many is followed."""
    points: tuple[CurvePoint, ...] = ()
    """The curve's points, from the least memory to the most."""

    @property
    def hit_rates(self) -> dict[float, float]:
        """Shares of the blocks, by memory. Empty: nothing was asked for."""
        return {one.memory: one.hit_blocks / self.asked_blocks for one in self.points} if self.asked_blocks else {}


@dataclass(frozen=True, kw_only=True)
class AdoptionReport:
    """Counts of the entries that a new process found in the memory of a dead one."""

    readable: int
    reserved: int
    """Reserved slots of sessions that may still write to them."""
    dropped: int
    """Entries that were half-written, or contradicted others."""


class Shrunk(NamedTuple):
    """The outcome of a call that gives memory back."""

    freed_bytes: int
    """Bytes that were given back."""
    pinned_bytes: int
    """Bytes that are not used any more, but that an engine's driver still has pinned."""
    is_done: bool
    """Whether all that was asked for is given back."""


class StoredBlocks(NamedTuple):
    """Blocks of one group that became readable together, and the block before each."""

    group: int
    hashes: bytes
    parents: bytes
    """One for each hash, or empty if they are not known."""
