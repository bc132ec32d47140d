"""The connector in a worker: registers the engine's tensors, hands blocks to the copy engine, reports what ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvoffload.cache import GroupRule, SegmentMap
from kvoffload.connector.cache_client import CopyPlaces
from kvoffload.connector.engine.host_memory import HostMemory, RegisteringEngine
from kvoffload.connector.engine.pipeline import Exchange, Pipeline, Stage, combine_weights, name_pipeline
from kvoffload.connector.identity.agreement import SharingTerms, add_report, describe_weights, make_register
from kvoffload.connector.rank_records import RankRecords
from kvoffload.connector.step_plan import (
    GroupFacts,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WeightDigests,
    WorkerFacts,
    WorkerReport,
)
from kvoffload.errors import KVOffloadError, NativeError, RegistrationError, StorageError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry, PageMap, Registration
from kvoffload.protocol import Register
from kvoffload.transfer import (
    CopyDirection,
    CopyEngine,
    FinishedCopy,
    compute_stream,
    open_engine,
    run_copy_self_test,
)
from kvoffload.transfer.copy_engine import CopyTicket, Marked, StreamPoint

logger = logging.getLogger(__name__)

MAX_FAULT_LINES = 20
"""A broken device fails every copy; the first lines say what there is to say."""
IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for copies to end, so that the engine does not spin."""
DRAIN_TIMEOUT_S = 10.0
"""How long copies on their way may go on when the engine takes its memory back; the rest fails, by CLOSE_TIMEOUT_S."""

_NO_WEIGHTS = WeightDigests()


@dataclass(frozen=True, kw_only=True)
class WorkerTerms:
    """What one rank is given: from settings and from the engine's configuration."""

    rank: int
    sharing: SharingTerms
    has_self_test: bool = True
    copy_threads: int = 0
    has_late_frees: bool = False
    """No step that was launched, or is about to be, touches the blocks of a load: it waits for none."""
    open_engine: Callable[..., CopyEngine] | None = None
    """None: the one that fits the device."""


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
    digests: Mapping[int, bytes] = field(default_factory=dict)
    """By shard."""
    copied_s: float = 0.0


class WorkerSide:
    """Owned by the worker's thread; the copy engine has threads of its own. Holds engine memory while registered."""

    def __init__(
        self,
        terms: WorkerTerms,
        open_cache: Callable[[Register], CopyPlaces],
        exchange: Exchange = lambda frame: (frame,),
    ) -> None:
        """Takes its terms; `exchange` is how it hears of the other ranks of the engine."""
        self.terms = terms
        self._open_cache = open_cache
        self._pipeline = Pipeline(exchange)
        self._registration = Registration()
        self.cache: CopyPlaces | None = None
        self.records: RankRecords | None = None
        """Known when the cache is joined."""
        self._identity = b""
        """This rank's. A cache that is registered anew has the same, or former records would not fit."""
        self._told: tuple[Place, ...] | None = ()
        """What the scheduler side knows of this rank's places; None: nobody can say."""
        self.engine: CopyEngine | None = None
        self._host_memory: HostMemory | None = None
        """If the copy engine wants to be told of the cache's memory."""
        self._copies: dict[CopyTicket, _Copy] = {}
        self._ended: list[_Ended] = []
        self._doomed: list[str] = []
        self._before_forward: StreamPoint | None = None
        """What the next loads come after; None: what the engine's stream has been given when they are submitted."""
        self._unended: list[tuple[CopyEngine, list[_Copy], HostMemory | None]] = []
        self._faults = 0
        self._device = torch.device("cpu")
        self._facts: WorkerFacts | None = None
        self.group_numbers = np.zeros(0, np.int64)
        self.record_bytes: list[int] = []

    @property
    def rank(self) -> int:
        return self.terms.rank

    @property
    def facts(self) -> WorkerFacts | None:
        """None until tensors are registered. A rank that let go of them has nowhere to copy, and stays who it was."""
        if self._facts is None or self.engine is not None:
            return self._facts
        return replace(self._facts, places=())

    @property
    def registration(self) -> Registration:
        return self._registration

    @property
    def is_copying(self) -> bool:
        """Copies are on their way."""
        return bool(self._copies)

    def register(
        self,
        geometry: KVGeometry,
        tensors: Mapping[str, torch.Tensor],
        *,
        scale_views: Mapping[str, torch.Tensor],
        identify: Callable[[KVGeometry], Identity],
        weights: WeightDigests = _NO_WEIGHTS,
    ) -> None:
        """Checks, proves, self-tests; raises what is wrong, and then holds nothing. Again after `unregister`."""
        device = next(iter(tensors.values())).device
        identity = identify(geometry)
        opened: list[CopyEngine] = []

        def open_tested(page_map: PageMap, memory: Mapping[str, torch.Tensor]) -> None:
            opened.append(self._open(page_map, memory, device))

        report = self._registration.register(geometry, tensors, scale_views=scale_views, self_test=open_tested)
        logger.debug("registered KV caches\n%s", report)
        (self.engine,) = opened
        self._registration.attach(self.engine)
        self._device = device
        stored = [index for index, group in enumerate(geometry.groups) if group.is_stored]
        self.group_numbers = np.array(stored, np.int64) * geometry.records_per_block
        groups = tuple(_group_facts(geometry, index) for index in stored)
        self.record_bytes = [group.record_bytes for group in groups]
        fingerprint, described = identity.fingerprint(), identity.describe()
        try:
            if self._identity not in (b"", fingerprint):
                raise RegistrationError("the engine's new cache has other records", remedy="start the engine anew")
            self._join(fingerprint, groups, described, weights)
            self._begin_memory()
            if self._host_memory is not None:
                self._host_memory.wait_for_first()
        except BaseException:
            self.unregister()
            raise
        is_first, self._identity = not self._identity, fingerprint
        self._facts = WorkerFacts(
            rank=self.terms.rank,
            fingerprint=fingerprint,
            description=described,
            groups=groups,
            num_blocks=geometry.num_blocks,
            cache_bytes=sum(allocation.size_bytes for allocation in geometry.allocations),
            claims=tuple(report.claims.items()),
            places=self._find_places(),
            weights=weights,
        )
        if is_first:
            self._told = self._facts.places

    def withdraw(self, fault: Exception) -> None:
        """`register` raised, or is not going to be called: the engine cannot start, and no other rank waits."""
        self._pipeline.withdraw(fault)

    def mark(self) -> None:
        """Is called before the step's forward is launched: the loads that are submitted next do not wait for it.

        Blocks of a load were allocated when the step was planned. Whoever wrote to them before that, or read them, is a
        forward of an earlier step, with its draft model and its states. What the engine itself does to new blocks is
        done at the beginning of this step, by either model runner: they are zeroed, and others are copied to them. All
        of that is given to this stream before vLLM binds the plan. This step's forward has tables of other requests. If
        some of them still name such a block, it is beyond what they look at: the engine gives it to other requests of
        the same forward as well, which write to it.

        An engine that frees blocks only when no step touches them any more leaves nothing to wait for.
        """
        self._before_forward = None
        if self.terms.has_late_frees:
            return
        try:
            stream = compute_stream(self._device)
            if self.engine is not None and stream is not None:
                self._before_forward = self.engine.mark(stream)
        except (KVOffloadError, RuntimeError) as fault:
            # They come after the forward.
            self._note_line("loads wait for the step's forward", str(fault))

    def submit(self, plan: StepPlan) -> None:
        """Begins a plan's copies, after the step's forward was launched."""
        before_forward, self._before_forward = self._before_forward, None
        self._doomed += plan.doomed
        jobs: tuple[SaveJob | LoadJob, ...] = (*plan.saves, *plan.loads)
        for job in jobs:
            try:
                self._begin(job, before_forward)
            except Exception as fault:  # noqa: BLE001  (a job that is never reported lets its request wait for ever)
                # Its words only: its frames hold views of engine memory, which may be about to be freed.
                self._ended.append(_Ended(job, str(fault) or type(fault).__name__))
        for memory_id in plan.retired:
            if self.cache is not None:
                self.cache.retire(memory_id)

    def take_results(self, *, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """(loads that ended, those of them that failed, what else there is to say) since the last call."""
        places = self._find_places()
        if self.engine is not None:
            self._collect(self.engine)
            if is_idle and self._copies and not self._ended and not self._doomed:
                self.engine.fence(IDLE_WAIT_S)
                self._collect(self.engine)
        finished, failed = set(self._doomed), set(self._doomed)
        self._doomed.clear()
        saved: dict[int, int] = {}
        failed_saves: set[int] = set()
        digests: dict[int, dict[int, bytes]] = {}
        ended, self._ended = self._ended, []
        copied_s = {one.job.request_id: one.copied_s for one in ended if isinstance(one.job, LoadJob) and one.copied_s}
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
                    digests[one.job.job] = dict(one.digests)
        report = WorkerReport(saved, frozenset(failed_saves), digests, self._find_news(places), copied_s)
        return finished, failed, report

    def unregister(self) -> None:
        """Lets copies on their way end, within a bound, then lets go of every tensor. The cache stays joined."""
        engine, self.engine = self.engine, None
        self._before_forward = self._told = None
        if engine is not None:
            engine.fence(DRAIN_TIMEOUT_S)
        if self._host_memory is not None:
            self._host_memory.close()
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
        self._host_memory = None

    def close(self) -> None:
        """Lets go of everything: the worker ends."""
        self.unregister()
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.close()

    def _open(self, page_map: PageMap, memory: Mapping[str, torch.Tensor], device: torch.device) -> CopyEngine:
        """Tested, if that is wanted: before the engine's first request every block is free."""
        engine = (self.terms.open_engine or open_engine)(page_map, memory, host_threads=self.terms.copy_threads)
        if self.terms.has_self_test:
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

    def _join(
        self,
        fingerprint: bytes,
        groups: tuple[GroupFacts, ...],
        description: Mapping[str, object],
        weights: WeightDigests,
    ) -> None:
        """The engine's session, whose memory blocks are copied to and from; once."""
        if self.cache is not None:
            return
        terms = self.terms
        ranks = self._pipeline.meet(
            Stage(fingerprint=fingerprint, record_bytes=tuple(self.record_bytes), weights=weights.name)
        )
        sizes = [max(of_group) for of_group in zip(*(rank.record_bytes for rank in ranks), strict=True)]
        together = combine_weights([rank.weights for rank in ranks])
        register = make_register(
            name_pipeline([rank.fingerprint for rank in ranks[:: terms.sharing.tensor_ranks]], together),
            tuple(replace(group, record_bytes=size) for group, size in zip(groups, sizes, strict=True)),
            terms.sharing,
            description=describe_weights(description, together),
            rank=terms.rank,
        )
        self.cache = self._open_cache(add_report(register, self._registration.report, terms.rank))
        self.records = RankRecords(
            shards=terms.sharing.shards_held_by(terms.rank),
            fingerprint=register.fingerprint,
            record_bytes=self.record_bytes,
            slot_bytes=sizes,
            page_groups=self.group_numbers.tolist(),
        )

    def _begin(self, job: SaveJob | LoadJob, before_forward: StreamPoint | None) -> None:
        """Hands one plan to the copy engine, of all groups. Raises what keeps it from being copied."""
        if self.engine is None:
            raise RegistrationError("no KV caches are registered", remedy="")
        sharing = self.terms.sharing
        if isinstance(job, SaveJob) and not sharing.is_writer(self.terms.rank):
            self._ended.append(_Ended(job, ""))
            return
        if self.cache is None or self.records is None or not self.cache.may_copy(job.place):
            raise StorageError("the memory of its slots is not mapped here", remedy="")
        memory = self.cache.memory(job.place.memory_id)
        items = self.records.find_items(memory, job.moves)
        if isinstance(job, SaveJob):
            direction, has_digests = CopyDirection.SAVE, True
            self.records.clear_tails(memory, job.moves)
        else:
            direction, has_digests = CopyDirection.LOAD, job.wanted is not None
        ticket = self.engine.submit(
            direction,
            items,
            has_digests=has_digests,
            after=self._find_point(direction, before_forward),
        )
        self._copies[ticket] = _Copy(job, memory)

    def _find_point(self, direction: CopyDirection, before_forward: StreamPoint | None) -> Marked:
        """Returns what a job's copies come after."""
        if direction is CopyDirection.LOAD and self.terms.has_late_frees:
            return None
        if direction is CopyDirection.LOAD and before_forward is not None:
            return before_forward
        return compute_stream(self._device)

    def _begin_memory(self) -> None:
        """From here on the copy engine hears of the cache's memory, if it wants to."""
        engine: object = self.engine
        if self._host_memory is None and self.cache is not None and isinstance(engine, RegisteringEngine):
            self._host_memory = HostMemory(engine, self.cache)
            self._host_memory.start()

    def _collect(self, engine: CopyEngine) -> None:
        for finished in engine.poll():
            copy = self._copies.pop(finished.ticket)
            self._ended.append(self._settle(copy, finished))

    def _settle(self, copy: _Copy, finished: FinishedCopy) -> _Ended:
        """What is to be said of a copy that has ended."""
        job, fault = copy.job, finished.fault
        if isinstance(job, SaveJob):
            if finished.digests is None or self.records is None:
                return _Ended(job, fault)
            return _Ended(job, fault, self.records.split_digests(finished.digests))
        if not fault and finished.digests is not None and self.records is not None:
            fault = self.records.compare(job, finished.digests)
        return _Ended(job, fault, copied_s=0.0 if fault else finished.copied_s)

    def _find_places(self) -> tuple[Place, ...]:
        """There are no places while no tensors are registered: a copy would fail."""
        if self.cache is None or self.engine is None:
            return ()
        return tuple(Place(*place) for place in self.cache.places())

    def _find_news(self, places: tuple[Place, ...]) -> dict[int, tuple[Place, ...]]:
        """Where this rank may copy, if that has changed since it was told."""
        if places == self._told:
            return {}
        self._told = places
        if self._host_memory is not None:
            self._host_memory.wake()
        return {self.terms.rank: places}

    def _give_up(self, engine: CopyEngine) -> None:
        """Gives up copies of a closed engine: what it has not ended never will be, and may still touch the memory of
        its slots."""
        if self._copies:
            self._unended.append((engine, list(self._copies.values()), self._host_memory))
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
        record_bytes=geometry.record_bytes(group),
    )


def _show(job: SaveJob | LoadJob) -> str:
    return f"load of request {job.request_id}" if isinstance(job, LoadJob) else f"save job {job.job}"
