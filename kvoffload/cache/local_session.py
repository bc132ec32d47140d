"""An engine that has its cache in its own process: `OffloadCache` over a `LocalCache`, with no server in between."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache.answers import Acquired, CacheStats, LeasedGroup, LeaseId
from kvoffload.cache.ask import Ask
from kvoffload.cache.index_reader import IndexReader
from kvoffload.cache.local_cache import LocalCache
from kvoffload.cache.offload_cache import AcquiredBlocks, BlockLease, Placed, Publication, ReservedSlots
from kvoffload.cache.segment_map import SegmentMap
from kvoffload.cache.settings import CacheGeometry
from kvoffload.types import Fingerprint


class LocalSession:
    """Safe to call from any thread, as the cache is, which stays its maker's. One identity, one session."""

    def __init__(
        self,
        cache: LocalCache,
        fingerprint: Fingerprint,
        geometry: CacheGeometry,
        *,
        tenant: str = "",
        others: Sequence[str] = (),
    ) -> None:
        """`tenant` pays for what is saved, unless it is published for one of the `others`."""
        self._cache = cache
        self._geometry = geometry
        self._name_space = cache.open_namespace(fingerprint, geometry)
        self._tenants = {name: cache.open_tenant(name) for name in (tenant, *others) if name}
        self._tenant = self._tenants.get(tenant, 0)
        self.session = cache.open_session()
        cache.add_process(self.session, pid=os.getpid())
        files = cache.files
        self._memory_id = os.fstat(files.index).st_ino
        self._index = IndexReader(cache.open_index())
        sizes = os.fstat(files.segments[0]).st_size
        self._segments = SegmentMap([os.dup(file) for file in files.segments], sizes)
        self._leases: set[int] = set()

    @property
    def memory_id(self) -> int:
        return self._memory_id

    def memory(self, memory_id: int) -> SegmentMap:
        if memory_id != self._memory_id:
            raise ValueError(f"memory {memory_id} is not mapped here")
        return self._segments

    def may_copy(self, held: Placed) -> bool:
        return (held.memory_id, held.session) == (self._memory_id, self.session)

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        if not 0 <= group < len(self._geometry.groups):
            raise ValueError(f"there is no group {group}, there are {len(self._geometry.groups)}")
        return self._index.lookup(self._name_space, group, hashes)

    def find_boundary(self, ask: Ask) -> int:
        return self._index.find_boundary(self._name_space, ask)

    def acquire(self, ask: Ask) -> AcquiredBlocks:
        found = self._cache.acquire(self.session, self._name_space, ask)
        return self._describe(found, found.groups)

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        found = self._cache.acquire_entries(self.session, self._name_space, group, hashes, shards=shards)
        return self._describe(found, found.groups[group : group + 1])

    def release(self, lease: BlockLease) -> None:
        if lease.memory_id == self._memory_id:
            self._leases.discard(lease.number)
            self._cache.release(self.session, LeaseId(lease.number))

    def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        found = self._cache.reserve(
            self.session, self._name_space, group, count=count, hashes=hashes, tenant=self._tenant
        )
        return ReservedSlots(self._memory_id, self.session, group, found.tickets, found.addresses)

    def publish(self, publication: Publication) -> bool:
        slots, digests, shards = publication.slots, publication.digests, publication.shards
        if slots.memory_id != self._memory_id:
            return False
        totals = [None] * shards if digests is None else digests.reshape(shards, len(slots))
        for each, of_shard in enumerate(totals, publication.shard):
            self._cache.commit(
                self.session,
                self._name_space,
                slots.group,
                slots.tickets,
                hashes=publication.hashes,
                parents=publication.parents,
                digests=of_shard,
                shard=each,
                tenant=self._tenants.get(publication.tenant),
            )
        return True

    def abort(self, slots: ReservedSlots) -> None:
        if slots.memory_id == self._memory_id:
            self._cache.abort(self.session, slots.tickets)

    def invalidate(self, group: int, hashes: Buffer) -> None:
        self._cache.invalidate(self._name_space, group, hashes)

    def stats(self) -> CacheStats:
        return self._cache.stats

    def close(self) -> None:
        for lease in self._leases:
            self._cache.release(self.session, LeaseId(lease))
        self._leases.clear()

    def _describe(self, found: Acquired, groups: tuple[LeasedGroup, ...]) -> AcquiredBlocks:
        if not found.is_hit:
            return AcquiredBlocks(found.outcome, found.boundary)
        self._leases.add(found.lease)
        lease = BlockLease(self._memory_id, found.lease, self.session)
        return AcquiredBlocks(found.outcome, found.boundary, lease, groups)
