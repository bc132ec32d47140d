"""A page linker over a pool of the kit and a real cache in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import (
    AcquiredBlocks,
    AcquireOutcome,
    Ask,
    BlockLease,
    CacheGeometry,
    CacheGroup,
    CacheSettings,
    CacheStats,
    GroupRule,
    HugePages,
    LocalCache,
    LocalSession,
    Placed,
    Publication,
    ReservedSlots,
    SegmentMap,
)
from kvoffload.client import PendingAcquire, PromptNote
from kvoffload.kvspec import GroupSpec, Registration
from kvoffload.sglang.host_pools import describe_host_pool
from kvoffload.sglang.linker_metrics import LinkerMetrics
from kvoffload.sglang.page_linker import GroupRows, PageLinker
from kvoffload.sglang.page_settings import PageSettings
from kvoffload.sglang.pools import describe_pool
from kvoffload.transfer import CopyEngine, open_engine
from kvoffload.types import Fingerprint
from tests.kit.sglang.pools import PAGE

FINGERPRINT = Fingerprint(b"s" * 32)
MEMORY = CacheSettings(
    memory_bytes=4 << 20,
    segment_bytes=2 << 20,
    extent_bytes=16 << 10,
    entry_limit=1 << 14,
    huge_pages=HugePages.NONE,
    threads=1,
)


class SessionCache:
    """A cache as a client has it. A test decides whether a server answers, how many slots there are, and where copies
    may go."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._record_bytes = [group.record_bytes for group in groups]
        geometry = CacheGeometry(
            hash_block_size=PAGE,
            groups=tuple(
                CacheGroup(
                    rule=GroupRule(block_size=PAGE, reuse=group.reuse_rule, window=group.window),
                    record_bytes=group.record_bytes,
                )
                for group in groups
            ),
        )
        self.local_cache = LocalCache.create(MEMORY)
        self.session = LocalSession(self.local_cache, FINGERPRINT, geometry)
        self.is_answering = self.is_mapped = self.is_served = True
        self.fault = ""
        self.has_tiers = False
        self.prefetched: list[Ask] = []
        self.told: list[PromptNote] = []
        self.slots_left = 1 << 20
        self.published: list[bytes] = []
        self.addresses: dict[tuple[int, bytes], int] = {}
        self.held: set[BlockLease] = set()
        self.steps = self.asked_for_slots = 0
        self.is_closed = False

    def stats(self) -> CacheStats:
        return self.session.stats()

    def record(self, name: bytes, group: int = 0) -> npt.NDArray[np.uint8]:
        """Returns a record's bytes, which a test may read and damage."""
        address = self.addresses[group, name]
        return self.session.memory(self.session.memory_id).view(address, self._record_bytes[group])

    # ---- what the linker does ----

    def begin_step(self) -> None:
        self.steps += 1

    def memory(self, memory_id: int) -> SegmentMap:
        return self.session.memory(memory_id)

    def may_copy(self, held: Placed) -> bool:
        return self.is_mapped and self.session.may_copy(held)

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return self.session.lookup(group, hashes)

    def start_acquire(self, ask: Ask) -> PendingAcquire:
        pending = PendingAcquire(local=ask.local)
        if self.is_answering:
            pending.found = self.session.acquire(ask)
            if pending.found.lease is not None:
                self.held.add(pending.found.lease)
        return pending

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        found = self.session.acquire_entries(group, hashes, shards=shards)
        if found.lease is not None:
            self.held.add(found.lease)
        return found

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        return pending.found

    def cancel(self, pending: PendingAcquire) -> None:
        pending.found = AcquiredBlocks(AcquireOutcome.MISS, pending.local)

    def prefetch(self, ask: Ask) -> None:
        self.prefetched.append(ask)

    def note_prompt(self, note: PromptNote) -> None:
        self.told.append(note)

    def release(self, lease: BlockLease) -> None:
        self.held.remove(lease)
        self.session.release(lease)

    def ready_slots(self) -> list[int]:
        self.asked_for_slots += 1
        return [self.slots_left]

    def take(self, group: int, count: int) -> ReservedSlots:
        slots = self.session.reserve(group, count=min(count, self.slots_left))
        self.slots_left -= len(slots)
        return slots

    def publish(self, publication: Publication) -> bool:
        names = bytes(publication.hashes)
        for at, address in enumerate(publication.slots.addresses.tolist()):
            name = names[32 * at : 32 * at + 32]
            self.published.append(name)
            self.addresses[publication.slots.group, name] = address
        return self.session.publish(publication)

    def abort(self, slots: ReservedSlots) -> None:
        self.session.abort(slots)

    def invalidate(self, group: int, hashes: Buffer) -> None:
        self.session.invalidate(group, hashes)

    def close(self) -> None:
        self.is_closed = True
        self.session.close()


@dataclass(frozen=True)
class Linked:
    """A rank with its pool."""

    linker: PageLinker
    cache: SessionCache
    pool: Any

    def save(self, keys: Sequence[str], rows: Sequence[int], *others: GroupRows) -> bool:
        """Offers, and waits until it is told as done."""
        self.linker.offload([pages_of(keys, rows), *others])
        while not self.linker.count_done():
            pass
        return self.linker.pop_done()

    def load(self, rid: str, keys: Sequence[str], rows: Sequence[int], *others: GroupRows) -> bool:
        return self.linker.load(rid, [pages_of(keys, rows), *others])


def pages_of(keys: Sequence[str], rows: Sequence[int], group: int = 0) -> GroupRows:
    return GroupRows(group, keys, np.array(rows, np.int64))


def link(
    pool: Any,
    *,
    cache: SessionCache | None = None,
    clock: Any = None,
    mask: bytes = bytes(32),
    wrap: Callable[[CopyEngine], Any] = lambda engine: engine,
    window: int = 0,
    metrics: LinkerMetrics | None = None,
    **settings: Any,
) -> Linked:
    """`wrap` makes of the copy engine the one that the linker has."""
    if hasattr(pool, "get_page_buffer_meta"):
        pages = describe_host_pool(pool, page_size=pool.page_size)
    else:
        pages = describe_pool(pool, page_size=pool.page_size, window=window)
    registration = Registration()
    registration.register(pages.geometry, pages.tensors)
    engine = wrap(open_engine(registration.page_map, registration.memory))
    cache = cache or SessionCache(pages.geometry.groups)
    given = PageSettings(page_size=pool.page_size, groups=pages.pool_settings, fingerprint=FINGERPRINT, **settings)
    timed = {} if clock is None else {"clock": clock}
    linker = PageLinker(given, cache, engine, mask=mask, metrics=metrics, **timed)
    return Linked(linker, cache, pool)


def make_keys(count: int, *, seed: int = 0) -> list[str]:
    """Makes keys of pages as SGLang has them."""
    return [hashlib.sha256(f"{seed} {at}".encode()).hexdigest() for at in range(count)]
