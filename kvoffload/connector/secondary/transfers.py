"""Stores and loads of a secondary tier: copies between vLLM's CPU tier and the cache's memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Ask, BlockLease, ReservedSlots
from kvoffload.client import Client, PendingAcquire, TierWait
from kvoffload.engines.record_mover import RecordDigests, RecordMover, Records
from kvoffload.errors import KVOffloadError
from kvoffload.kvspec import Allocation
from kvoffload.kvspec.page_map import GroupPages, PageMap
from kvoffload.transfer.copy_engine import CopyEngine

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


@dataclass(eq=False, kw_only=True)
class _Store(_Job):
    left: list[int]
    """Positions of the chunks that have no slot yet."""
    copying: list[int] = field(default_factory=list)
    """Positions of the chunks that are being copied."""


@dataclass(eq=False, kw_only=True)
class _Load(_Job):
    pending: PendingAcquire | None
    """The question to the cache; None once it was answered."""
    lease: BlockLease | None = None


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
        cache: Client,
        engine: CopyEngine,
        settings: TransferSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the copy engine, which `close` closes, and the cache, which the caller closes."""
        self._cache = cache
        digests = RecordDigests(settings.fingerprint, [settings.record_bytes])
        self._mover: RecordMover[_Store | _Load] = RecordMover(cache, engine, digests)
        self._settings = settings
        self._clock = clock
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
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
        for store in [one for one in self._stores.values() if one.left and not one.copying]:
            self._go_on(store)
        for load in [one for one in self._loads.values() if one.pending is not None]:
            self._harvest(load)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Waits until no copy runs and all jobs have ended, as `poll` then reports. Copies that have not begun fail."""
        self._cancel()
        while self._mover.moves:
            self._mover.engine.fence(DRAIN_LOOK_S)
            self._settle_copies()

    def close(self) -> None:
        """Ends all transfers. NativeError: a copy still runs, and the rows must stay."""
        self._cancel()
        self._mover.engine.close()
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
        if store.copying:
            return
        if store.left and (not self._cache.is_served or self._clock() - store.begun_s > STORE_WAIT_S):
            store.left.clear()
        slots = self._cache.take(GROUP, len(store.left)) if store.left else None
        if slots is not None and len(slots):
            copying, store.left = store.left[: len(slots)], store.left[len(slots) :]
            place = (GROUP, slots.memory_id, slots.addresses)
            records = Records(b"".join(store.names[at] for at in copying), store.rows[copying], *place)
            if self._begin(store, records, slots):
                store.copying = copying
            else:
                self._cache.abort(slots)
        if not (store.left or store.copying):
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
        records = Records(
            b"".join(load.names[:count]),
            load.rows[:count],
            GROUP,
            found.lease.memory_id,
            leased.addresses[:count],
            leased.digests[0][:count] if self._settings.verify_always else None,
        )
        if self._begin(load, records):
            load.lease = found.lease
        else:
            self._cache.release(found.lease)
            self._end(load)

    def _begin(self, job: _Store | _Load, records: Records, *slots: ReservedSlots) -> bool:
        """Begins to copy records. False: nothing will be copied."""
        try:
            self._mover.begin(job, [records], slots)
        except (ValueError, KVOffloadError) as fault:
            self._complain("save" if slots else "load", str(fault))
            return False
        return True

    def _settle_copies(self) -> None:
        for move in self._mover.poll():
            job, bad = move.job, [place for part in move.wrong for place in part.tolist()]
            fault = move.fault or (f"{len(bad)} records differ from the saved bytes" if bad else "")
            if fault:
                self._complain("save" if move.slots else "load", fault)
            if isinstance(job, _Store):
                job.kept.update(job.copying if move.is_published else ())
                job.copying = []
                self._go_on(job)
                continue
            if not move.fault:
                job.kept.update(set(range(len(move.parts[0].blocks))).difference(bad))
            assert job.lease is not None
            self._cache.release(job.lease)
            self._end(job)

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

    def _complain(self, act: str, fault: str) -> None:
        """Logs the first few different faults: a broken server or device fails every copy."""
        if fault not in self._complaints and len(self._complaints) < COMPLAINT_LIMIT:
            self._complaints.add(fault)
            logger.warning("the secondary tier could not %s: %s", act, fault)


def _as_rows(rows: Sequence[int] | Rows) -> Rows:
    return np.asarray(rows, np.int64)
