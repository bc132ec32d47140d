"""The connector in a worker: registers the engine's tensors, hands blocks to the copy engine, reports what ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload.cache import GroupRule, SegmentMap
from kvoffload.connector.agreement import SharingTerms, add_report, make_register
from kvoffload.connector.cache_client import CopyPlaces
from kvoffload.connector.step_plan import (
    BlockMoves,
    GroupFacts,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WorkerFacts,
    WorkerReport,
)
from kvoffload.errors import KVOffloadError, NativeError, RegistrationError, StorageError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry, PageMap, Registration
from kvoffload.native import finish_digests
from kvoffload.protocol import Register
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
from kvoffload.types import HASH_BYTES

logger = logging.getLogger(__name__)

MAX_FAULT_LINES = 20
"""A broken device fails every copy; the first lines say what there is to say."""
IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for copies to end, so that the engine does not spin."""
DRAIN_TIMEOUT_S = 10.0
"""How long copies on their way may go on when the engine takes its memory back; the rest fails, by CLOSE_TIMEOUT_S."""


@dataclass(frozen=True, kw_only=True)
class WorkerTerms:
    """What one rank is given: from settings and from the engine's configuration."""

    rank: int
    sharing: SharingTerms
    has_self_test: bool = True
    copy_threads: int = 0
    open_engine: Callable[..., CopyEngine] = open_engine


@dataclass(frozen=True)
class _Copy:
    """A job that the copy engine has, and the memory of its slots, which stays as long as this."""

    job: SaveJob | LoadJob
    memory: SegmentMap


@dataclass(frozen=True)
class _Ended:
    """A job to report. `fault` is one line, empty if every byte is where it belongs."""

    job: SaveJob | LoadJob
    fault: str
    digests: bytes = b""


class WorkerSide:
    """Owned by the worker's thread; the copy engine has threads of its own. Holds engine memory while registered."""

    def __init__(self, terms: WorkerTerms, open_cache: Callable[[Register], CopyPlaces]) -> None:
        self._terms = terms
        self._open_cache = open_cache
        self._registration = Registration()
        self._cache: CopyPlaces | None = None
        self._fingerprint = b""
        """The engine's: what digests are made with."""
        self._identity = b""
        """This rank's. A cache that is registered anew has the same, or former records would not fit."""
        self._told: tuple[Place, ...] = ()
        self._engine: CopyEngine | None = None
        self._known: dict[int, SegmentMap] = {}
        """Memories that the copy engine has been told of: it may use them until it is closed."""
        self._copies: dict[CopyTicket, _Copy] = {}
        self._ended: list[_Ended] = []
        self._doomed: list[str] = []
        self._unended: list[tuple[CopyEngine, list[_Copy]]] = []
        self._faults = 0
        self._device = torch.device("cpu")
        self._facts: WorkerFacts | None = None
        self._group_numbers = np.zeros(0, np.int64)
        self._record_bytes: list[int] = []
        self._slot_bytes: list[int] = []
        """By group, of each shard's part of a slot. More than a record where another rank's is larger."""

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
        groups = tuple(_group_facts(geometry, index) for index in stored)
        self._record_bytes = [group.record_bytes for group in groups]
        fingerprint, described = identity.fingerprint(), identity.describe()
        try:
            if self._identity not in (b"", fingerprint):
                raise RegistrationError("the engine's new cache has other records", remedy="start the engine anew")
            if self._terms.sharing.pipeline_ranks == 1:
                terms = self._terms
                self.join(make_register(fingerprint, groups, terms.sharing, description=described, rank=terms.rank))
        except BaseException:
            self.unregister()
            raise
        self._identity = fingerprint
        self._facts = WorkerFacts(
            rank=self._terms.rank,
            fingerprint=fingerprint,
            description=described,
            groups=groups,
            num_blocks=geometry.num_blocks,
            cache_bytes=sum(allocation.size_bytes for allocation in geometry.allocations),
            claims=tuple(report.claims.items()),
            places=self._find_places(),
        )
        self._told = self._facts.places

    def join(self, register: Register) -> None:
        """The engine's session, whose memory blocks are copied to and from; once."""
        if self._cache is None:
            self._cache = self._open_cache(add_report(register, self._registration.report, self._terms.rank))
            self._fingerprint = register.fingerprint
            self._slot_bytes = [group.record_bytes for group in register.groups]

    def submit(self, plan: StepPlan) -> None:
        """After the step's forward was launched."""
        self._doomed += plan.doomed
        if plan.register is not None:
            try:
                self.join(plan.register)
            except (KVOffloadError, OSError) as fault:
                # The engine runs: its blocks are not saved until this works.
                self._note_line("the cache cannot be joined", str(fault))
        jobs: tuple[SaveJob | LoadJob, ...] = (*plan.saves, *plan.loads)
        for job in jobs:
            try:
                self._begin(job)
            except Exception as fault:  # noqa: BLE001  (a job that is never reported lets its request wait for ever)
                # Its words only: its frames hold views of engine memory, which may be about to be freed.
                self._ended.append(_Ended(job, str(fault) or type(fault).__name__))
        for memory_id in plan.retired:
            if self._cache is not None:
                self._cache.retire(memory_id)

    def take_results(self, *, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """(loads that ended, those of them that failed, what else there is to say) since the last call."""
        if self._engine is not None:
            self._collect(self._engine)
            if is_idle and self._copies and not self._ended and not self._doomed:
                self._engine.fence(IDLE_WAIT_S)
                self._collect(self._engine)
        finished, failed = set(self._doomed), set(self._doomed)
        self._doomed.clear()
        saved: dict[int, int] = {}
        failed_saves: set[int] = set()
        digests: dict[int, dict[int, bytes]] = {}
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
                elif one.digests:
                    digests[one.job.job] = {self._terms.sharing.shard_of(self._terms.rank): one.digests}
        return finished, failed, WorkerReport(saved, frozenset(failed_saves), digests, self._find_news())

    def unregister(self) -> None:
        """Lets copies on their way end, within a bound, then lets go of every tensor. The cache stays joined."""
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
        self._known.clear()

    def close(self) -> None:
        """The worker ends."""
        self.unregister()
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _open(self, page_map: PageMap, memory: Mapping[str, torch.Tensor], device: torch.device) -> CopyEngine:
        """Tested, if that is wanted: before the engine's first request every block is free."""
        engine = self._terms.open_engine(page_map, memory, host_threads=self._terms.copy_threads)
        if self._terms.has_self_test:
            stored = [group for group, pages in enumerate(page_map.groups) if pages.record_bytes]
            try:
                run_copy_self_test(
                    engine,
                    page_map,
                    memory,
                    free_blocks=dict.fromkeys(stored, page_map.num_blocks - 1),
                    has_digests=True,
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
        sharing = self._terms.sharing
        if isinstance(job, SaveJob) and not sharing.is_writer(self._terms.rank):
            self._ended.append(_Ended(job, ""))
            return
        if self._cache is None or not self._cache.may_copy(job.place):
            raise StorageError("the memory of its slots is not mapped here", remedy="")
        memory = self._find_memory(job.place.memory_id)
        items = CopyItems(
            group=self._group_numbers[job.moves.groups],
            block=job.moves.blocks,
            slot=self._find_slots(memory, job.moves),
        )
        if isinstance(job, SaveJob):
            direction, has_digests = CopyDirection.SAVE, True
            self._clear_tails(memory, job.moves)
        else:
            direction, has_digests = CopyDirection.LOAD, job.wanted is not None
        ticket = self._engine.submit(
            direction,
            items,
            has_digests=has_digests,
            after=compute_stream(self._device),
        )
        self._copies[ticket] = _Copy(job, memory)

    def _find_memory(self, memory_id: int) -> SegmentMap:
        assert self._cache is not None
        memory = self._cache.memory(memory_id)
        if memory_id not in self._known and self._device.type == "cuda":
            for address, size_bytes in memory.ranges():
                self._engine.add_host_range(address, size_bytes)  # type: ignore[union-attr]
            self._known[memory_id] = memory
        return memory

    def _find_slots(self, memory: SegmentMap, moves: BlockMoves) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Where this rank's part of each record lies in this process."""
        shard = self._terms.sharing.shard_of(self._terms.rank)
        slots = np.empty(len(moves), np.uint64)
        for group, slot_bytes in enumerate(self._slot_bytes):
            mine = moves.groups == group
            if mine.any():
                slots[mine] = memory.pointers(moves.addresses[mine] + np.uint64(shard * slot_bytes), slot_bytes)
        return slots

    def _clear_tails(self, memory: SegmentMap, moves: BlockMoves) -> None:
        """What this rank's records leave of their slots is part of their digests, as zeros."""
        shard = self._terms.sharing.shard_of(self._terms.rank)
        for group, (record_bytes, slot_bytes) in enumerate(zip(self._record_bytes, self._slot_bytes, strict=True)):
            if record_bytes < slot_bytes:
                for address in moves.addresses[moves.groups == group].tolist():
                    memory.view(address + shard * slot_bytes + record_bytes, slot_bytes - record_bytes)[:] = 0

    def _collect(self, engine: CopyEngine) -> None:
        for finished in engine.poll():
            copy = self._copies.pop(finished.ticket)
            self._ended.append(self._settle(copy, finished))

    def _settle(self, copy: _Copy, finished: FinishedCopy) -> _Ended:
        """What is to be said of a copy that has ended."""
        job, fault = copy.job, finished.fault
        if isinstance(job, SaveJob):
            digests = b"" if finished.digests is None else finished.digests.tobytes()
            return _Ended(job, fault, digests)
        if not fault and finished.digests is not None:
            fault = self._compare(job, finished.digests)
        return _Ended(job, fault)

    def _compare(self, job: LoadJob, totals: RunDigests) -> str:
        """The first loaded record whose bytes are not those that were saved."""
        assert job.wanted is not None
        shard = self._terms.sharing.shard_of(self._terms.rank)
        names = np.frombuffer(job.wanted.hashes, np.uint8).reshape(-1, HASH_BYTES)
        wanted = job.wanted.digests[shard]
        for group, slot_bytes in enumerate(self._slot_bytes):
            mine = np.flatnonzero(job.moves.groups == group)
            if not len(mine):
                continue
            found = finish_digests(
                totals[mine].tobytes(),
                slot_bytes,
                fingerprint=self._fingerprint,
                block_hashes=names[mine].tobytes(),
                group=group,
                shard=shard,
            )
            # 0: nobody has made a digest of this record yet.
            bad = (np.frombuffer(found, np.uint64) != wanted[mine]) & (wanted[mine] != 0)
            if bad.any():
                block = int(job.moves.blocks[mine[bad.argmax()]])
                return f"a record of group {group} is not what was saved (loaded into block {block})"
        return ""

    def _find_places(self) -> tuple[Place, ...]:
        return () if self._cache is None else tuple(Place(*place) for place in self._cache.places())

    def _find_news(self) -> dict[int, tuple[Place, ...]]:
        """Where this rank may copy, if that has changed since it was told."""
        places = self._find_places()
        if places == self._told:
            return {}
        self._told = places
        return {self._terms.rank: places}

    def _give_up(self, engine: CopyEngine) -> None:
        """Of a closed engine: what it has not ended never will be, and may still touch the memory of its slots."""
        if self._copies:
            self._unended.append((engine, list(self._copies.values())))
            self._ended += [_Ended(copy.job, "the copy did not end in time") for copy in self._copies.values()]
            self._copies = {}

    def _note_fault(self, ended: _Ended) -> None:
        self._note_line(f"{_show(ended.job)} failed", ended.fault)

    def _note_line(self, what: str, why: str) -> None:
        self._faults += 1
        if self._faults <= MAX_FAULT_LINES:
            last = ", no further ones are logged" if self._faults == MAX_FAULT_LINES else ""
            logger.warning("%s: %s%s", what, why, last)


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
