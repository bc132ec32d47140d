"""Stores and loads of a secondary tier: copies between vLLM's CPU tier and the cache's memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Ask, BlockLease, Publication, ReservedSlots, SegmentMap
from kvoffload.client import PendingAcquire, TierWait
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.errors import KVOffloadError
from kvoffload.kvspec import Allocation
from kvoffload.kvspec.page_map import GroupPages, PageMap
from kvoffload.native import finish_digests
from kvoffload.transfer.copy_engine import CopyDirection, CopyEngine, CopyItems, FinishedCopy

logger = logging.getLogger(__name__)

JOB_LIMIT = 512
"""Maximum number of jobs that have not ended; further ones fail at once. Each has one copy under way at a time."""
STORE_WAIT_S = 5.0
"""How long a store waits for slots, in seconds; its other chunks are then not stored. Its chunks stay pinned as
long."""
DRAIN_LOOK_S = 1.0
COMPLAINT_LIMIT = 8

GROUP = 0
"""All of vLLM's groups are one here: a chunk of any of them is one row of the CPU tier."""
SHARD = 0
"""A row holds the pages of all ranks."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """The settings of one engine's tier: its records, and how they are checked."""

    fingerprint: bytes
    record_bytes: int
    block_tokens: int
    verify_always: bool = False
    promote_wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job that has ended. `kept` has the positions of the chunks that are now at the job's destination."""

    job: int
    kept: frozenset[int]
    chunks: int
    seconds: float

    @property
    def is_whole(self) -> bool:
        return len(self.kept) == self.chunks


@dataclass(eq=False, kw_only=True)
class _Job:
    number: int
    names: tuple[bytes, ...]
    rows: Rows
    begun_s: float
    kept: set[int] = field(default_factory=set)
    is_copying: bool = False


@dataclass(eq=False, kw_only=True)
class _Store(_Job):
    left: list[int]
    """Positions of the chunks that have no slot yet."""


@dataclass(eq=False, kw_only=True)
class _Load(_Job):
    pending: PendingAcquire | None
    """The question to the cache; None once it was answered."""


@dataclass(eq=False, kw_only=True)
class _StoreCopy:
    store: _Store
    slots: ReservedSlots
    positions: list[int]
    memory: SegmentMap
    """The memory of the slots, which stays mapped as long as this copy is known."""


@dataclass(eq=False, kw_only=True)
class _LoadCopy:
    load: _Load
    lease: BlockLease
    count: int
    wanted: npt.NDArray[np.uint64] | None
    memory: SegmentMap


def map_rows(*, rows: int, row_bytes: int) -> PageMap:
    """Returns the CPU tier's layout for a copy engine: one block for each chunk's row, in one piece."""

    def column(value: int) -> Rows:
        return np.array([value], np.int64)

    pages = GroupPages(
        name="chunks",
        record_bytes=row_bytes,
        parts=(),
        allocation=column(0),
        base=column(0),
        stride=column(row_bytes),
        length=column(row_bytes),
        record_offset=column(0),
    )
    allocation = Allocation(name=ROWS, size_bytes=rows * row_bytes)
    return PageMap(num_blocks=rows, null_block=None, allocations=(allocation,), groups=(pages,))


ROWS = "rows"
"""The name of the CPU tier's memory in the page map."""


class TierTransfers:
    """Called by one thread at a time, the one that calls the tier. Only `drain` and `close` wait.

    `poll` reports every begun job once, whether it succeeded or failed; until then the job owns its rows.
    """

    def __init__(
        self,
        cache: CacheClient,
        engine: CopyEngine,
        settings: TransferSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the copy engine, which `close` closes, and the cache, which the caller closes."""
        self._cache = cache
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._copies: dict[int, _StoreCopy | _LoadCopy] = {}
        self._ended: list[EndedJob] = []
        self._complaints: set[str] = set()

    def __len__(self) -> int:
        """Returns the number of jobs that have not ended."""
        return len(self._stores) + len(self._loads)

    def knows(self, job: int) -> bool:
        """Whether `poll` will report this job."""
        return job in self._stores or job in self._loads or any(one.job == job for one in self._ended)

    def store(self, job: int, names: Sequence[bytes], rows: Sequence[int] | Rows) -> None:
        """Begins to copy rows to the cache, as far as it does not have them."""
        store = _Store(number=job, names=tuple(names), rows=_as_rows(rows), begun_s=self._clock(), left=[])
        if len(self) < JOB_LIMIT and self._cache.is_served:
            here = self._cache.lookup(GROUP, b"".join(names))
            store.kept.update(np.flatnonzero(here).tolist())
            store.left = np.flatnonzero(~here).tolist()
        self._stores[job] = store
        self._go_on(store)

    def load(self, job: int, names: Sequence[bytes], rows: Sequence[int] | Rows) -> None:
        """Begins to load chunks into these rows. Chunks after the first one that is gone are not loaded."""
        load = _Load(number=job, names=tuple(names), rows=_as_rows(rows), begun_s=self._clock(), pending=None)
        if len(self) >= JOB_LIMIT or not names:
            self._end(load)
            return
        far = TierWait(wait_s=self._settings.promote_wait_s) if self._cache.has_tiers else None
        load.pending = self._cache.start_acquire(
            Ask(
                b"".join(names),
                limit=len(names) * self._settings.block_tokens,
                alignment=self._settings.block_tokens,
                shards=(SHARD,),
            ),
            far=far,
        )
        self._loads[job] = load
        self._harvest(load)

    def poll(self) -> list[EndedJob]:
        """Returns the jobs that have ended since the last call."""
        self._settle_copies()
        for store in [one for one in self._stores.values() if one.left and not one.is_copying]:
            self._go_on(store)
        for load in [one for one in self._loads.values() if one.pending is not None]:
            self._harvest(load)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Waits until no copy runs and all jobs have ended, as `poll` then reports. Copies that have not begun fail."""
        self._cancel()
        while self._copies:
            self._engine.fence(DRAIN_LOOK_S)
            self._settle_copies()

    def close(self) -> None:
        """Ends all transfers. NativeError: a copy still runs, and the rows must stay."""
        self._cancel()
        self._engine.close()
        self._settle_copies()

    # ---- inside ----

    def _cancel(self) -> None:
        for store in list(self._stores.values()):
            store.left.clear()
            self._go_on(store)
        for load in list(self._loads.values()):
            if load.pending is not None:
                self._cache.cancel(load.pending)
                load.pending = None
                self._end(load)

    def _go_on(self, store: _Store) -> None:
        """Copies the chunks for which there are slots now. Ends the store if none are left."""
        if store.is_copying:
            return
        if store.left and (not self._cache.is_served or self._clock() - store.begun_s > STORE_WAIT_S):
            store.left.clear()
        slots = self._cache.take(GROUP, len(store.left)) if store.left else None
        if slots is not None and len(slots):
            positions, store.left = store.left[: len(slots)], store.left[len(slots) :]
            submitted = self._submit(CopyDirection.SAVE, slots.memory_id, slots.addresses, store.rows[positions])
            if submitted is None:
                self._cache.abort(slots)
            else:
                ticket, memory = submitted
                store.is_copying = True
                self._copies[ticket] = _StoreCopy(store=store, slots=slots, positions=positions, memory=memory)
        if not (store.left or store.is_copying):
            self._end(store)

    def _harvest(self, load: _Load) -> None:
        """Copies the leased chunks, if the answer has come."""
        assert load.pending is not None
        found = self._cache.poll(load.pending)
        if found is None:
            return
        load.pending = None
        if found.lease is None:
            self._end(load)
            return
        count = found.boundary // self._settings.block_tokens
        (leased,) = found.groups
        addresses = leased.addresses[:count]
        wanted = leased.digests[0][:count] if self._settings.verify_always else None
        submitted = self._submit(
            CopyDirection.LOAD, found.lease.memory_id, addresses, load.rows[:count], has_digests=wanted is not None
        )
        if submitted is None:
            self._cache.release(found.lease)
            self._end(load)
            return
        ticket, memory = submitted
        load.is_copying = True
        self._copies[ticket] = _LoadCopy(load=load, lease=found.lease, count=count, wanted=wanted, memory=memory)

    def _submit(
        self,
        direction: CopyDirection,
        memory_id: int,
        addresses: npt.NDArray[np.uint64],
        rows: Rows,
        *,
        has_digests: bool = True,
    ) -> tuple[int, SegmentMap] | None:
        """Hands a copy to the copy engine. None: it was not taken, and nothing will be copied."""
        try:
            memory = self._cache.memory(memory_id)
            slots = memory.pointers(addresses, self._settings.record_bytes)
            items = CopyItems(group=np.zeros(len(rows), np.int64), block=rows, slot=slots)
            return self._engine.submit(direction, items, has_digests=has_digests), memory
        except (ValueError, KVOffloadError) as fault:
            self._complain(direction, str(fault))
            return None

    def _settle_copies(self) -> None:
        for finished in self._engine.poll():
            copy = self._copies.pop(finished.ticket)
            if finished.fault:
                self._complain(
                    CopyDirection.SAVE if isinstance(copy, _StoreCopy) else CopyDirection.LOAD, finished.fault
                )
            if isinstance(copy, _StoreCopy):
                self._settle_store(copy, finished)
            else:
                self._settle_load(copy, finished)

    def _settle_store(self, copy: _StoreCopy, finished: FinishedCopy) -> None:
        store = copy.store
        store.is_copying = False
        if finished.fault or finished.digests is None:
            self._cache.abort(copy.slots)
        else:
            names = b"".join(store.names[position] for position in copy.positions)
            digests = self._finish(finished.digests, names)
            if self._cache.publish(Publication(copy.slots, hashes=names, digests=digests, shard=SHARD)):
                store.kept.update(copy.positions)
        self._go_on(store)

    def _settle_load(self, copy: _LoadCopy, finished: FinishedCopy) -> None:
        load = copy.load
        load.is_copying = False
        if not finished.fault:
            bad = self._find_bad(copy, finished)
            if bad:
                self._complain(CopyDirection.LOAD, f"{len(bad)} records differ from the saved bytes")
                self._cache.invalidate(GROUP, b"".join(load.names[position] for position in bad))
            load.kept.update(set(range(copy.count)).difference(bad))
        self._cache.release(copy.lease)
        self._end(load)

    def _find_bad(self, copy: _LoadCopy, finished: FinishedCopy) -> list[int]:
        """Returns the positions of records whose bytes are not those that were saved. A digest of 0 is not made yet."""
        if copy.wanted is None:
            return []
        assert finished.digests is not None
        found = self._finish(finished.digests, b"".join(copy.load.names[: copy.count]))
        bad: list[int] = np.flatnonzero((found != copy.wanted) & (copy.wanted != 0)).tolist()
        return bad

    def _finish(self, totals: npt.NDArray[np.uint64], names: bytes) -> npt.NDArray[np.uint64]:
        settings = self._settings
        digests = finish_digests(
            totals.tobytes(),
            settings.record_bytes,
            fingerprint=settings.fingerprint,
            block_hashes=names,
            group=GROUP,
            shard=SHARD,
        )
        return np.frombuffer(digests, np.uint64)

    def _end(self, job: _Job) -> None:
        jobs: dict[int, _Store] | dict[int, _Load] = self._stores if isinstance(job, _Store) else self._loads
        jobs.pop(job.number, None)
        self._ended.append(
            EndedJob(
                job=job.number,
                kept=frozenset(job.kept),
                chunks=len(job.names),
                seconds=self._clock() - job.begun_s,
            )
        )

    def _complain(self, direction: CopyDirection, fault: str) -> None:
        """Logs the first few different faults: a broken server or device fails every copy."""
        if fault not in self._complaints and len(self._complaints) < COMPLAINT_LIMIT:
            self._complaints.add(fault)
            logger.warning("the secondary tier could not %s: %s", direction.value, fault)


def _as_rows(rows: Sequence[int] | Rows) -> Rows:
    return np.asarray(rows, np.int64)
