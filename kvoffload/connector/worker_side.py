"""The connector in a worker: registers the engine's tensors, copies blocks to records and back, reports what ended."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvoffload.cache import GroupRule
from kvoffload.cache.plain_records import PlainRecords
from kvoffload.connector.copy_thread import CopyThread
from kvoffload.connector.step_plan import BlockMove, GroupFacts, LoadJob, SaveJob, StepPlan, WorkerFacts, WorkerReport
from kvoffload.errors import StorageError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry, PageMap, Registration, run_self_test
from kvoffload.transfer.plain_copy import PlainCopy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)

MAX_FAULT_LINES = 20
"""A broken device fails every copy; the first lines say what there is to say."""
IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for a copy to end, so that the engine does not spin."""


class WorkerSide:
    """Owned by the worker's thread; `CopyThread` runs the jobs. Holds engine memory from register to unregister."""

    def __init__(self, *, self_test: bool, verify_always: bool) -> None:
        self._has_self_test = self_test
        self._registration = Registration()
        self._records = PlainRecords(has_digests=verify_always)
        self._thread = CopyThread()
        self._faults = 0
        self._copy: PlainCopy | None = None
        self._device = torch.device("cpu")
        self._facts: WorkerFacts | None = None
        self._groups: tuple[int, ...] = ()

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
        self._device = next(iter(tensors.values())).device
        identity = identify(geometry)
        report = self._registration.register(
            geometry, tensors, scale_views=scale_views, self_test=self._self_test if self._has_self_test else None
        )
        logger.debug("registered KV caches\n%s", report)
        self._copy = PlainCopy(self._registration.page_map, self._registration.memory)
        self._registration.attach(self._copy)
        self._groups = tuple(index for index, group in enumerate(geometry.groups) if group.is_stored)
        self._facts = WorkerFacts(
            fingerprint=identity.fingerprint(),
            description=identity.describe(),
            groups=tuple(_group_facts(geometry, index) for index in self._groups),
            num_blocks=geometry.num_blocks,
        )
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """After the step's forward was launched. Saves first: a load may be of what was saved one step before."""
        if plan.drops:
            self._thread.submit(None, partial(self._records.drop, plan.drops))
        try:
            ready = self._record_event()
        except RuntimeError as fault:
            # The device is in trouble. Jobs that are never reported would let their requests wait for ever.
            for job in (*plan.saves, *plan.loads):
                self._thread.submit(job, partial(_fail, fault))
            return
        for save in plan.saves:
            self._thread.submit(save, partial(self._save, save, ready))
        for load in plan.loads:
            self._thread.submit(load, partial(self._load, load, ready))

    def take_results(self, *, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """(loads that ended, those of them that failed, saves that ended) since the last call."""
        finished: set[str] = set()
        failed: set[str] = set()
        saved: dict[int, int] = {}
        failed_saves: set[int] = set()
        for ended in self._thread.take_ended(wait_s=IDLE_WAIT_S if is_idle else 0.0):
            if ended.fault is not None:
                self._note_fault(ended.name, ended.fault)
            if isinstance(ended.name, LoadJob):
                finished.add(ended.name.request_id)
                if ended.fault is not None:
                    failed.add(ended.name.request_id)
            elif isinstance(ended.name, SaveJob):
                saved[ended.name.job] = 1
                if ended.fault is not None:
                    failed_saves.add(ended.name.job)
        return finished, failed, WorkerReport(saved, frozenset(failed_saves))

    def _note_fault(self, name: object, fault: Exception) -> None:
        self._faults += 1
        if self._faults <= MAX_FAULT_LINES:
            last = ", no further ones are logged" if self._faults == MAX_FAULT_LINES else ""
            logger.warning("%s failed: %s%s", _show(name), fault, last)

    def unregister(self) -> None:
        """Waits for copies on their way, then lets go of every tensor. Records stay."""
        self._thread.close()
        self._copy = None
        self._facts = None
        held = self._registration.unregister()
        if held:
            logger.error("memory of %s is still referenced after it was unregistered", ", ".join(held))

    def close(self) -> None:
        """The worker ends."""
        self.unregister()
        self._records.clear()

    def _save(self, job: SaveJob, ready: torch.cuda.Event | None) -> None:
        with self._stream(ready):
            for group, moves in _by_group(job.moves):
                rows = self._copy_out(self._groups[group], [move.block for move in moves])
                self._records.write([move.slot for move in moves], rows)

    def _load(self, job: LoadJob, ready: torch.cuda.Event | None) -> None:
        if job.is_doomed:
            raise StorageError(f"request {job.request_id} could not be planned", remedy="")
        with self._stream(ready):
            for group, moves in _by_group(job.moves):
                rows = torch.stack(self._records.read([move.slot for move in moves]))
                self._copy_in(self._groups[group], [move.block for move in moves], rows)

    def _copy_out(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        assert self._copy is not None
        record_bytes = self._registration.page_map.groups[group].record_bytes
        rows = torch.empty((len(blocks), record_bytes), dtype=torch.uint8, device=self._device)
        self._copy.save(group, blocks, rows)
        return rows.cpu()

    def _copy_in(self, group: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        assert self._copy is not None
        self._copy.load(group, blocks, rows.to(self._device))

    def _record_event(self) -> torch.cuda.Event | None:
        """What the engine has launched so far on its stream: copies come after it."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _stream(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        return nullcontext() if ready is None else _CopyStream(self._device, ready)

    def _self_test(self, page_map: PageMap, memory: Mapping[str, torch.Tensor]) -> None:
        """Through the copies that will be used. Before the engine's first request every block is free."""
        copy = PlainCopy(page_map, memory)
        stored = [group for group, pages in enumerate(page_map.groups) if pages.record_bytes]

        def save(group: int, block: int) -> torch.Tensor:
            rows = torch.empty((1, page_map.groups[group].record_bytes), dtype=torch.uint8, device=self._device)
            copy.save(group, [block], rows)
            return rows.cpu()

        def load(group: int, block: int, rows: torch.Tensor) -> None:
            copy.load(group, [block], rows.to(self._device))

        block = page_map.num_blocks - 1
        run_self_test(page_map, memory, free_blocks=dict.fromkeys(stored, block), save=save, load=load)
        copy.close()


class _CopyStream:
    """A stream of the copy thread's own, after `ready`; done when the block is left."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event) -> None:
        self._stream = torch.cuda.Stream(device)
        self._context = torch.cuda.stream(self._stream)
        self._ready = ready

    def __enter__(self) -> None:
        self._context.__enter__()
        self._stream.wait_event(self._ready)

    def __exit__(self, *fault: object) -> None:
        self._context.__exit__(*fault)
        self._stream.synchronize()


def _fail(fault: Exception) -> None:
    raise fault


def _group_facts(geometry: KVGeometry, index: int) -> GroupFacts:
    group = geometry.groups[index]
    return GroupFacts(
        index=index,
        name=group.name,
        rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
        record_bytes=group.record_bytes,
    )


def _by_group(moves: Sequence[BlockMove]) -> list[tuple[int, list[BlockMove]]]:
    grouped: defaultdict[int, list[BlockMove]] = defaultdict(list)
    for move in moves:
        grouped[move.group].append(move)
    return list(grouped.items())


def _show(name: object) -> str:
    if isinstance(name, LoadJob):
        return f"load of request {name.request_id}"
    return f"save job {name.job}" if isinstance(name, SaveJob) else "dropping records"
