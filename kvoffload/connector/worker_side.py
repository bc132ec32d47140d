"""The connector in a worker: registers the engine's tensors, hands blocks to the copy engine, reports what ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload.cache import GroupRule
from kvoffload.cache.plain_records import PlainRecords, Record, check_digests
from kvoffload.connector.step_plan import GroupFacts, LoadJob, SaveJob, StepPlan, WorkerFacts, WorkerReport
from kvoffload.errors import NativeError, RegistrationError, StorageError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry, PageMap, Registration
from kvoffload.transfer import (
    CopyDirection,
    CopyEngine,
    CopyItems,
    FinishedCopy,
    compute_stream,
    open_engine,
    run_copy_self_test,
)
from kvoffload.transfer.copy_engine import CopyTicket, RunDigests

logger = logging.getLogger(__name__)

MAX_FAULT_LINES = 20
"""A broken device fails every copy; the first lines say what there is to say."""
IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for copies to end, so that the engine does not spin."""
DRAIN_TIMEOUT_S = 10.0
"""How long copies on their way may go on when the engine takes its memory back; the rest fails, by CLOSE_TIMEOUT_S."""


@dataclass(frozen=True)
class _Copy:
    """A job that the copy engine has, and the records that it reads or writes, whose memory stays as long as this."""

    job: SaveJob | LoadJob
    records: list[Record]


@dataclass(frozen=True)
class _Ended:
    """A job to report. `fault` is one line, empty if every byte is where it belongs."""

    job: SaveJob | LoadJob
    fault: str


class WorkerSide:
    """Owned by the worker's thread; the copy engine has threads of its own. Holds engine memory while registered."""

    def __init__(self, *, self_test: bool, verify_always: bool, copy_threads: int = 0) -> None:
        self._has_self_test = self_test
        self._has_digests = verify_always
        self._copy_threads = copy_threads
        self._registration = Registration()
        self._records = PlainRecords()
        self._engine: CopyEngine | None = None
        self._copies: dict[CopyTicket, _Copy] = {}
        self._ended: list[_Ended] = []
        self._unended: list[tuple[CopyEngine, list[_Copy]]] = []
        self._faults = 0
        self._device = torch.device("cpu")
        self._facts: WorkerFacts | None = None
        self._group_numbers = np.zeros(0, np.int64)

    @property
    def facts(self) -> WorkerFacts | None:
        """None until tensors are registered."""
        return self._facts

    @property
    def registration(self) -> Registration:
        return self._registration

    def register(
        self,
        geometry: KVGeometry,
        tensors: Mapping[str, torch.Tensor],
        *,
        scale_views: Mapping[str, torch.Tensor],
        identify: Callable[[KVGeometry], Identity],
    ) -> None:
        """Checks, proves, self-tests; raises what is wrong, and then holds nothing. Again after `unregister`."""
        device = next(iter(tensors.values())).device
        identity = identify(geometry)
        opened: list[CopyEngine] = []

        def open_tested(page_map: PageMap, memory: Mapping[str, torch.Tensor]) -> None:
            opened.append(self._open(page_map, memory, device))

        report = self._registration.register(geometry, tensors, scale_views=scale_views, self_test=open_tested)
        logger.debug("registered KV caches\n%s", report)
        (self._engine,) = opened
        self._registration.attach(self._engine)
        self._device = device
        stored = [index for index, group in enumerate(geometry.groups) if group.is_stored]
        self._group_numbers = np.array(stored, np.int64)
        self._facts = WorkerFacts(
            fingerprint=identity.fingerprint(),
            description=identity.describe(),
            groups=tuple(_group_facts(geometry, index) for index in stored),
            num_blocks=geometry.num_blocks,
        )

    def submit(self, plan: StepPlan) -> None:
        """After the step's forward was launched. What is loaded has been reported as saved before."""
        self._records.drop(plan.drops)
        jobs: tuple[SaveJob | LoadJob, ...] = (*plan.saves, *plan.loads)
        for job in jobs:
            try:
                self._begin(job)
            except Exception as fault:  # noqa: BLE001  (a job that is never reported lets its request wait for ever)
                # Its words only: its frames hold views of engine memory, which may be about to be freed.
                self._ended.append(_Ended(job, str(fault) or type(fault).__name__))

    def take_results(self, *, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """(loads that ended, those of them that failed, saves that ended) since the last call."""
        if self._engine is not None:
            self._collect(self._engine)
            if is_idle and self._copies and not self._ended:
                self._engine.fence(IDLE_WAIT_S)
                self._collect(self._engine)
        finished: set[str] = set()
        failed: set[str] = set()
        saved: dict[int, int] = {}
        failed_saves: set[int] = set()
        ended, self._ended = self._ended, []
        for one in ended:
            if one.fault:
                self._note_fault(one)
            if isinstance(one.job, LoadJob):
                finished.add(one.job.request_id)
                if one.fault:
                    failed.add(one.job.request_id)
            else:
                saved[one.job.job] = 1
                if one.fault:
                    failed_saves.add(one.job.job)
        return finished, failed, WorkerReport(saved, frozenset(failed_saves))

    def unregister(self) -> None:
        """Lets copies on their way end, within a bound, then lets go of every tensor. Records stay."""
        engine, self._engine, self._facts = self._engine, None, None
        if engine is not None:
            engine.fence(DRAIN_TIMEOUT_S)
        try:
            held = self._registration.unregister()  # which closes the copy engine
        except NativeError as fault:
            held = ()
            logger.error("%s", fault)
        if held:
            logger.error("memory of %s is still referenced after it was unregistered", ", ".join(held))
        if engine is not None:
            self._collect(engine)
            self._give_up(engine)

    def close(self) -> None:
        """The worker ends."""
        self.unregister()
        self._records.clear()

    def _open(self, page_map: PageMap, memory: Mapping[str, torch.Tensor], device: torch.device) -> CopyEngine:
        """Tested, if that is wanted: before the engine's first request every block is free."""
        engine = open_engine(page_map, memory, host_threads=self._copy_threads)
        if self._has_self_test:
            stored = [group for group, pages in enumerate(page_map.groups) if pages.record_bytes]
            try:
                run_copy_self_test(
                    engine,
                    page_map,
                    memory,
                    free_blocks=dict.fromkeys(stored, page_map.num_blocks - 1),
                    has_digests=self._has_digests,
                    after=compute_stream(device),
                )
            except BaseException:
                engine.close()
                raise
        return engine

    def _begin(self, job: SaveJob | LoadJob) -> None:
        """Hands one plan to the copy engine, of all groups. Raises what keeps it from being copied."""
        if self._engine is None:
            raise RegistrationError("no KV caches are registered", remedy="")
        if isinstance(job, LoadJob) and job.is_doomed:
            raise StorageError(f"request {job.request_id} could not be planned", remedy="")
        moves = np.array(job.moves, np.int64).reshape(-1, 3)
        group, block = self._group_numbers[moves[:, 0]], moves[:, 1]
        slots = moves[:, 2].tolist()
        sizes = [self._registration.page_map.groups[number].record_bytes for number in group.tolist()]
        if isinstance(job, SaveJob):
            direction, records = CopyDirection.SAVE, self._records.reserve(slots, sizes)
        else:
            direction, records = CopyDirection.LOAD, self._records.acquire(slots, sizes)
        slot = np.array([record.address for record in records], np.uint64)
        items = CopyItems(group=group, block=block, slot=slot)
        ticket = self._engine.submit(
            direction, items, has_digests=self._has_digests, after=compute_stream(self._device)
        )
        self._copies[ticket] = _Copy(job, records)

    def _collect(self, engine: CopyEngine) -> None:
        for finished in engine.poll():
            copy = self._copies.pop(finished.ticket)
            self._ended.append(_Ended(copy.job, self._settle(copy, finished)))

    def _settle(self, copy: _Copy, finished: FinishedCopy) -> str:
        """What a copy that has ended leaves behind; its fault."""
        if finished.fault:
            return finished.fault
        digests = _as_numbers(finished.digests)
        if isinstance(copy.job, SaveJob):
            self._records.commit(copy.records, digests)
        elif digests is not None:
            try:
                check_digests(copy.records, digests)
            except StorageError as fault:
                return str(fault)
        return ""

    def _give_up(self, engine: CopyEngine) -> None:
        """Of a closed engine: what it has not ended never will be, and may still touch the memory of its records."""
        if self._copies:
            self._unended.append((engine, list(self._copies.values())))
            self._ended += [_Ended(copy.job, "the copy did not end in time") for copy in self._copies.values()]
            self._copies = {}

    def _note_fault(self, ended: _Ended) -> None:
        self._faults += 1
        if self._faults <= MAX_FAULT_LINES:
            last = ", no further ones are logged" if self._faults == MAX_FAULT_LINES else ""
            logger.warning("%s failed: %s%s", _show(ended.job), ended.fault, last)


def _as_numbers(digests: RunDigests | None) -> list[int] | None:
    return None if digests is None else [low | high << 64 for low, high in digests.tolist()]


def _group_facts(geometry: KVGeometry, index: int) -> GroupFacts:
    group = geometry.groups[index]
    return GroupFacts(
        index=index,
        name=group.name,
        rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
        record_bytes=group.record_bytes,
    )


def _show(job: SaveJob | LoadJob) -> str:
    return f"load of request {job.request_id}" if isinstance(job, LoadJob) else f"save job {job.job}"
