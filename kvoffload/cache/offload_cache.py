"""An engine's calls about cached blocks of one identity, wherever they are kept: the contract of `LocalSession`
and `Client`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache.answers import Addresses, CacheStats, LeasedGroup, Tickets
from kvoffload.cache.ask import Ask
from kvoffload.cache.segment_map import SegmentMap
from kvoffload.types import AcquireOutcome


class Placed(Protocol):
    """A lease or slots that a session holds in a memory."""

    @property
    def memory_id(self) -> int: ...

    @property
    def session(self) -> int: ...


@dataclass(frozen=True)
class BlockLease:
    """Records of this memory stay where they are until it is released. Plain data: it may travel between processes."""

    memory_id: int
    number: int
    session: int
    """The memory's session that holds it. Nothing of it is taken back before that session's processes have ended."""


@dataclass(frozen=True, eq=False)
class AcquiredBlocks:
    """The answer of `acquire`: with a lease if it is a hit. `boundary` is in tokens, `local` again where it is none."""

    outcome: AcquireOutcome
    boundary: int
    lease: BlockLease | None = None
    groups: tuple[LeasedGroup, ...] = ()

    @property
    def is_hit(self) -> bool:
        return self.outcome is AcquireOutcome.HIT


@dataclass(frozen=True, eq=False)
class ReservedSlots:
    """Slots of one group to write to, and the rights to publish them. Plain data."""

    memory_id: int
    session: int
    group: int
    tickets: Tickets
    addresses: Addresses

    def __len__(self) -> int:
        return len(self.tickets)

    def __getitem__(self, part: slice | npt.NDArray[np.bool_]) -> ReservedSlots:
        return ReservedSlots(self.memory_id, self.session, self.group, self.tickets[part], self.addresses[part])


class Publication(NamedTuple):
    """Records that have been written: those of `shards` shards from `shard` on."""

    slots: ReservedSlots
    hashes: Buffer
    parents: Buffer | None = None
    digests: npt.NDArray[np.uint64] | None = None
    """Shard after shard. See `LocalCache.commit` for both."""
    shard: int = 0
    shards: int = 1
    tenant: str = ""
    """Tenant whose quota pays, if the session may name it; otherwise the session's own tenant pays."""


class OffloadCache(Protocol):
    """Hashes are contiguous buffers of 32 bytes each. A wrong length, or a group that does not exist, is a ValueError.

    Publications, aborts, releases and invalidations take effect in the order of the calls, before any later request; a
    `lookup` may see them later. A call that cannot be served now answers with a miss, no slots, or nothing.
    """

    @property
    def memory_id(self) -> int:
        """The memory that new leases and slots lie in; 0: there is none."""
        ...

    def memory(self, memory_id: int) -> SegmentMap:
        """Returns the memory that slots lie in. ValueError: it is not mapped here (any more)."""
        ...

    def may_copy(self, held: Placed) -> bool:
        """Whether this process may copy from or to what another process of its engine holds: the memory is mapped here,
        and would wait for this process's exit. A process must not copy otherwise; what it holds itself it may."""
        ...

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        """Returns which blocks are readable now. Changes nothing and does not wait."""
        ...

    def find_boundary(self, ask: Ask) -> int:
        """Returns the boundary that an `acquire` would find now; `local` if there is none."""
        ...

    def acquire(self, ask: Ask) -> AcquiredBlocks:
        """The longest boundary that all groups accept, and a lease on what a load up to it needs."""
        ...

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        """A lease on these blocks of one group, all or none."""
        ...

    def release(self, lease: BlockLease) -> None:
        """Ends a lease: no copy reads its records any more. One that is over is ignored."""
        ...

    def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        """`count` slots, fewer where there is no room; or with `hashes` one for each block that is not readable, ticket
        0 for the others."""
        ...

    def publish(self, publication: Publication) -> bool:
        """Publishes shards of blocks. A block is readable when all its shards are published. Slots that do not belong
        to the session (any more) are ignored.

        False: the slots lie in a former memory, which no look-up searches; nothing is published.
        """
        ...

    def abort(self, slots: ReservedSlots) -> None:
        """Gives slots back, written or not."""
        ...

    def invalidate(self, group: int, hashes: Buffer) -> None:
        """Forgets blocks whose bytes are not to be trusted. Leases on them stay good."""
        ...

    def stats(self) -> CacheStats:
        """Returns counts of the whole pool at this moment. UnavailableError: no server can be asked."""
        ...

    def close(self) -> None:
        """Releases what is leased: no copy runs any more. Slots stay reserved until their process ends."""
        ...
