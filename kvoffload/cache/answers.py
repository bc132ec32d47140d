"""What a cache answers. Misses and refusals are values here, not exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)

Addresses = npt.NDArray[np.uint64]
"""Of slots, counted over all segments as if they lay one behind the other."""
Tickets = npt.NDArray[np.uint64]
"""Rights to write to reserved slots. 0 stands for a block that needs no saving."""

NO_ADDRESS = 2**64 - 1


class AcquireOutcome(Enum):
    """Whether there is a lease, and if not, why."""

    HIT = 0
    MISS = 1
    OVER_LIMIT = 2
    """The session is not open, or would hold more than its limit."""
    NO_ROOM = 3
    """The index cannot hold another lease."""


class LeaseFor(IntEnum):
    """What a lease on blocks is for. Only use counts for policies, and as hits or misses."""

    USE = 0
    UPKEEP = 1
    """Their bytes are read all the same, and checked where they have to be."""
    KEEP = 2
    """They are not to go. No byte is read: whoever acquires them for use checks them."""


class CommitOutcome(IntEnum):
    """What became of one committed record; the numbers are those in the array that `commit` returns."""

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
    """Its bytes were not what they should be, or somebody said so."""
    CLEARED = 3


@dataclass(frozen=True, kw_only=True)
class Departed:
    """Says what is remembered of a block that was in memory."""

    why: Leaving
    seconds_ago: int
    missing_bytes: int
    """More memory that would have kept it, about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundEntries:
    """Of `matches` entries those that were wanted, in parallel columns."""

    matches: int
    hashes: bytes
    name_spaces: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.uint64]
    seconds: npt.NDArray[np.uint64]
    """Since each was stored; 2^64 - 1: by a process before this one."""
    leases: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.uint64]
    used: npt.NDArray[np.uint64]
    """1: it was acquired for use since."""


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
    """Says how long evicted blocks were in memory: by bucket, the last for those that were there longer than any
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
    """One place of a tier below memory, a disk's folder for example."""

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
    """Of these, as they are in memory."""
    coded_stored_bytes: int = 0
    """Of these, as they were written or came."""


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
    """Of the evicted entries, those that nobody had loaded."""
    tenants: tuple[TenantUsage, ...]
    places: tuple[PlaceUsage, ...] = ()
    """Of tiers below memory, as the server tells them."""
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """With each of them: counts by name."""
    ready_bytes: int = 0
    """Of the capacity, what has its memory by now."""
    residence: Residence = field(default_factory=Residence)
    """Of evicted entries. A server tells it apart."""
    used_by: Mapping[int, int] = field(default_factory=dict)
    """Bytes in slots by namespace, where it has any. Likewise."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Says what a pool of another size would have had of what was asked for."""

    memory: float
    """As a multiple of the pool's: 0.5 is half of it."""
    hit_blocks: int
    hit_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Says what less and more memory would bring. What was asked for are blocks that engines loaded, and those that
    they computed and saved. What is long ago counts less."""

    asked_blocks: int = 0
    """Of groups that keep prefixes."""
    asked_bytes: int = 0
    """Of all groups."""
    one_in: int = 1
    """Of so many blocks one is followed."""
    points: tuple[CurvePoint, ...] = ()
    """From the least memory to the most."""

    @property
    def hit_rates(self) -> dict[float, float]:
        """Shares of the blocks, by memory. Empty: nothing was asked for."""
        return {one.memory: one.hit_blocks / self.asked_blocks for one in self.points} if self.asked_blocks else {}


@dataclass(frozen=True, kw_only=True)
class AdoptionReport:
    """What a new process found in the memory of a dead one."""

    readable: int
    reserved: int
    """Of sessions that may still write to them."""
    dropped: int
    """Half-written, or in contradiction to others."""


class StoredBlocks(NamedTuple):
    """Blocks of one group that became readable together, and the block before each."""

    group: int
    hashes: bytes
    parents: bytes
    """As many, or none: nobody knows them."""
