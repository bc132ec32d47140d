"""The connector in a worker: registers the engine's tensors, hands blocks to the copy engine, reports what ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.cache import GroupRule, SegmentMap
from kvoffload.client import Client
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.orders import NodeOrders, NodeReport
from kvoffload.connector.common.step_plan import (
    GroupFacts,
    GroupKey,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WeightDigests,
    WorkerFacts,
    WorkerReport,
    store_apart,
)
from kvoffload.connector.engine.geometry import table_of
from kvoffload.connector.engine.host_memory import HostMemory, RegisteringEngine
from kvoffload.connector.engine.pipeline import (
    Exchange,
    Pipeline,
    Stage,
    combine_weights,
    join_ranks,
    name_pipeline,
)
from kvoffload.connector.identity.agreement import (
    SharingSettings,
    add_report,
    describe_weights,
    make_register,
    name_division,
    name_node,
)
from kvoffload.connector.nodes.node_proxy import NodeProxy
from kvoffload.connector.rank_records import RankRecords
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.errors import KVOffloadError, NativeError, RegistrationError, StorageError
from kvoffload.keys.identity import Identity, describe_parts
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
from kvoffload.types import Fingerprint

logger = logging.getLogger(__name__)

MAX_FAULT_LINES = 20
"""Maximum number of log lines about faults: a broken device fails every copy, always for the same reason."""
IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for copies to end, in seconds, so that the engine does not spin."""
DRAIN_TIMEOUT_S = 10.0
"""How long copies may go on when the engine takes its memory back, in seconds; the rest fails, by CLOSE_TIMEOUT_S."""

_NO_WEIGHTS = WeightDigests()


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The settings of one rank, from the user's and from the engine's configuration."""

    rank: int
    sharing: SharingSettings
    has_self_test: bool = True
    copy_threads: int = 0
    has_late_frees: bool = False
    """Whether no step that was launched, or is about to be, touches the blocks of a load: then loads wait for none."""
    open_engine: Callable[..., CopyEngine] | None = None
    """Opens the copy engine; None: the one that fits the device is opened."""


@dataclass(frozen=True)
class _Copy:
    """A job that the copy engine works on, and the memory of its slots, which stays mapped as long as this lives."""

    job: SaveJob | LoadJob
    memory: SegmentMap
    records: RankRecords
    scratch: npt.NDArray[np.uint8] | None = None
    """Memory for records that are only compared; None: the job is a load."""


@dataclass(frozen=True)
class _Ended:
    """A job to report. `fault` is one line, empty if every byte is where it belongs."""

    job: SaveJob | LoadJob
    fault: str
    digests: bytes = b""
    copied_s: float = 0.0


class WorkerSide:
    """Owned by the worker's thread; the copy engine has threads of its own. Holds engine memory while registered."""

    def __init__(
        self,
        settings: WorkerSettings,
        open_cache: Callable[[Register], Client],
        exchange: Exchange = lambda frame: (frame,),
        open_node: Callable[[Register, Sequence[GroupFacts]], CacheClient] | None = None,
    ) -> None:
        """Takes its settings. `exchange` swaps messages with the engine's other ranks. `open_node` opens the cache a
        second time, for the scheduler side's orders to this node's server if it runs on another node."""
        self.settings = settings
        self._open_cache = open_cache
        self._open_node = open_node
        self.proxy: NodeProxy | None = None
        """Asks this node's server on behalf of the scheduler side. Only the lowest rank of a node has it, and only
        where the scheduler side runs on another node."""
        self._pipeline = Pipeline(exchange)
        self._registration = Registration()
        self.cache: Client | None = None
        self.records: RankRecords | None = None
        """This rank's part of records; None until the cache is joined."""
        self._groups: tuple[GroupFacts, ...] = ()
        """The groups of the session, which all ranks of the node have in common."""
        self._own_groups: dict[GroupKey, int] = {}
        """The number that each session group of this rank's stage has in the rank's page map."""
        self._apart: set[GroupKey] = set()
        """Groups of which every rank stores its own bytes, even if its layers should hold the same ones."""
        self._name = Fingerprint(b"")
        self._register: Register | None = None
        self._described: Mapping[str, object] = {}
        """A readable description of the engine."""
        self._identity = b""
        """This rank's fingerprint. A cache that is registered again must have the same, or former records do not
        fit."""
        self._told: tuple[Place, ...] | None = ()
        """This rank's places as last reported to the scheduler side; None: they must be reported again."""
        self.engine: CopyEngine | None = None
        self._host_memory: HostMemory | None = None
        """Registers the cache's memory, if the copy engine wants that."""
        self._copies: dict[CopyTicket, _Copy] = {}
        self._ended: list[_Ended] = []
        self._doomed: list[str] = []
        self._before_forward: StreamPoint | None = None
        """The point in the engine's stream after which the next loads run; None: the stream's end at their
        submission."""
        self._unended: list[tuple[CopyEngine, list[_Copy], HostMemory | None]] = []
        self._faults = 0
        self._device = torch.device("cpu")
        self._facts: WorkerFacts | None = None

    @property
    def rank(self) -> int:
        return self.settings.rank

    @property
    def node(self) -> int:
        """The number of the machine that this rank is on, among those of the engine."""
        return self.settings.sharing.node_of(self.settings.rank)

    @property
    def facts(self) -> WorkerFacts | None:
        """This rank's registration; None until tensors are registered. A rank that has released them has no places to
        copy to, and keeps its identity."""
        if self._facts is None or self.engine is not None:
            return self._facts
        return replace(self._facts, places=())

    @property
    def registration(self) -> Registration:
        return self._registration

    @property
    def is_copying(self) -> bool:
        """Whether copies are on their way."""
        return bool(self._copies)

    def register(
        self,
        geometry: KVGeometry,
        tensors: Mapping[str, torch.Tensor],
        *,
        scale_views: Mapping[str, torch.Tensor],
        identify: Callable[[KVGeometry], Identity],
        weights: WeightDigests = _NO_WEIGHTS,
        replicas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Registers the engine's tensors: checks them, proves that all bytes are accounted for, and tests the copies.
        May be called again after `unregister`. After a failure, which it raises, it holds no tensors.

        `replicas`: how many tensor ranks in a row hold the same bytes of each layer; 1 for layers that are not in it.
        """
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
        stage = self.settings.sharing.stage_of(self.settings.rank)
        groups = store_apart([_group_facts(geometry, number, stage, replicas) for number in stored], self._apart)
        self._own_groups = {
            group.key: number * geometry.records_per_block for number, group in zip(stored, groups, strict=True)
        }
        fingerprint, described = identity.fingerprint(), identity.describe()
        try:
            if self._identity not in (b"", fingerprint):
                raise RegistrationError("the engine's new cache has other records", remedy="restart the engine")
            first_report = self._join(fingerprint, groups, described, weights)
            self._begin_memory()
            if self._host_memory is not None:
                self._host_memory.wait_for_first()
        except BaseException:
            self.unregister()
            raise
        is_first, self._identity = not self._identity, fingerprint
        self._facts = WorkerFacts(
            rank=self.settings.rank,
            fingerprint=fingerprint,
            description=described,
            groups=groups,
            num_blocks=geometry.num_blocks,
            cache_bytes=sum(allocation.size_bytes for allocation in geometry.allocations),
            claims=tuple(report.claims.items()),
            places=self._find_places(),
            weights=weights,
            node_report=first_report,
        )
        if is_first:
            self._told = self._facts.places

    def withdraw(self, fault: Exception) -> None:
        """Lets the other ranks know that this one will not register, so that they do not wait. The engine cannot start
        then."""
        self._pipeline.withdraw(fault)

    def mark(self) -> None:
        """Marks the point in the engine's stream for which the next loads wait. Called before the step's forward is
        launched, so that they do not wait for it.

        Blocks of a load were allocated when the step was planned. Only forwards of earlier steps have used them before
        that, with their draft model and their states. The engine itself prepares new blocks at the beginning of this
        step, with either model runner: it zeroes them, or copies others to them. All of that is queued in this stream
        before vLLM binds the plan. This step's forward has tables of other requests. If some of these still name such a
        block, they do not look that far: the engine may give it to other requests of the same forward, which write to
        it, just as well.

        An engine that frees blocks only when no step touches them any more leaves nothing to wait for.
        """
        self._before_forward = None
        if self.settings.has_late_frees:
            return
        try:
            stream = compute_stream(self._device)
            if self.engine is not None and stream is not None:
                self._before_forward = self.engine.mark(stream)
        except (KVOffloadError, RuntimeError) as fault:
            # Without a mark, loads run after the forward.
            self._note_line("loads wait for the step's forward", str(fault))

    def submit(self, plan: StepPlan) -> None:
        """Begins a plan's copies. Called after the step's forward was launched."""
        before_forward, self._before_forward = self._before_forward, None
        self._doomed += plan.doomed
        jobs: tuple[SaveJob | LoadJob, ...] = (*plan.saves, *plan.loads)
        for job in jobs:
            try:
                self._begin(self._take_part(job), before_forward)
            except Exception as fault:  # noqa: BLE001  (a job that is never reported lets its request wait for ever)
                # Only its text is kept: its frames hold views of engine memory, which may be about to be freed.
                self._ended.append(_Ended(job, str(fault) or type(fault).__name__))
        self._retire(plan.retired)
        if plan.apart:
            self._store_apart(plan.apart)

    def obey(self, nodes: Mapping[int, NodeOrders]) -> None:
        """Carries out the scheduler side's orders for this rank's node."""
        orders = nodes.get(self.node)
        if orders is not None:
            self._retire(orders.retired)
            if self.proxy is not None:
                self.proxy.obey(orders)

    def take_results(self, *, is_idle: bool) -> tuple[set[str], set[str], WorkerReport]:
        """Returns the loads that ended since the last call, those of them that failed, and the rest of the report. If
        `is_idle`, it waits for `IDLE_WAIT_S` at most."""
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
                    digests[one.job.job] = {self.settings.rank: one.digests}
        news = self.proxy.report(is_idle=is_idle) if self.proxy is not None else None
        report = WorkerReport(
            saved,
            frozenset(failed_saves),
            digests,
            self._find_news(places),
            copied_s,
            nodes={} if news is None else {self.node: news},
        )
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
        proxy, self.proxy = self.proxy, None
        if proxy is not None:
            proxy.close()
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.close()

    def _open(self, page_map: PageMap, memory: Mapping[str, torch.Tensor], device: torch.device) -> CopyEngine:
        """Opens the copy engine, and tests it if the settings say so: before the first request every block is free."""
        engine = (self.settings.open_engine or open_engine)(page_map, memory, host_threads=self.settings.copy_threads)
        if self.settings.has_self_test:
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
    ) -> NodeReport | None:
        """Joins the engine's session, to whose memory blocks are copied; once. Returns this node's first report for the
        scheduler side, if that runs on another node."""
        if self.records is not None:
            return None
        sharing = self.settings.sharing
        ranks = self._pipeline.meet(
            Stage(
                fingerprint=fingerprint,
                groups=groups,
                weights=weights.name,
                described=describe_parts(description),
            )
        )
        together = combine_weights([rank.weights for rank in ranks])
        self._name = name_pipeline([rank.fingerprint for rank in ranks[:: sharing.tensor_ranks]], together)
        self._described = describe_weights(ranks[0].described, together)
        first = self.node * sharing.node_ranks
        mine = ranks[first : first + sharing.node_ranks]
        self.cache = self._open_session(join_ranks(mine, stage_ranks=sharing.stage_ranks, first=first))
        if self.node == 0 or self.settings.rank % sharing.node_ranks or self._open_node is None:
            return None
        assert self._register is not None
        self.proxy = NodeProxy(self._open_node(self._register, self._groups), groups=len(self._groups))
        return self.proxy.begin()

    def _open_session(self, groups: tuple[GroupFacts, ...]) -> Client:
        """Opens the session of the whole engine, with the groups of this rank's node."""
        self._groups, rank, sharing = groups, self.settings.rank, self.settings.sharing
        name = name_division(self._name, sharing.list_divisions(groups))
        self._register = register = make_register(
            name_node(name, self.node, sharing.nodes), groups, sharing, description=self._described, rank=rank
        )
        cache = self._open_cache(add_report(register, self._registration.report, rank))
        keys = [group.key for group in groups]
        self.records = RankRecords(
            RankPart.find(rank, groups, sharing),
            fingerprint=register.fingerprint,
            record_bytes=[group.record_bytes for group in groups],
            own_groups={at: self._own_groups[key] for at, key in enumerate(keys) if key in self._own_groups},
        )
        return cache

    def _store_apart(self, apart: tuple[GroupKey, ...]) -> None:
        """Opens another session, in which each rank stores its own bytes of these groups: ranks do not hold the same
        bytes as they should. If that fails, nothing is copied any more."""
        if self._facts is None:
            return
        former, cache = self.cache, None
        self._apart.update(apart)
        self._facts = replace(self._facts, groups=store_apart(self._facts.groups, apart))
        try:
            cache = self._open_session(store_apart(self._groups, apart))
        except Exception as fault:  # noqa: BLE001  (this is a step of an engine that runs)
            self._note_line("ranks are not stored apart", str(fault) or type(fault).__name__)
        self.cache = cache
        if self._host_memory is not None and cache is not None:
            self._host_memory.follow(cache)
        if former is not None:
            former.close()

    def _take_part(self, job: SaveJob | LoadJob) -> SaveJob | LoadJob:
        """Returns this node's part of a job."""
        if not job.places:
            return job
        if isinstance(job, SaveJob):
            return job.take_node(self.node)
        rows = self.settings.sharing.count_node_rows(self._groups)
        return job.take_node(self.node, slice(self.node * rows, (self.node + 1) * rows))

    def _retire(self, memories: Sequence[int]) -> None:
        """Unmaps these former memories, which no job uses any more."""
        for memory_id in memories:
            if self.cache is not None:
                self.cache.retire(memory_id)

    def _begin(self, job: SaveJob | LoadJob, before_forward: StreamPoint | None) -> None:
        """Hands this rank's part of a job to the copy engine. Raises if it cannot be copied."""
        if self.engine is None:
            raise RegistrationError("no KV caches are registered", remedy="")
        if self.cache is None or self.records is None or not self.cache.may_copy(job.place):
            raise StorageError("the memory of its slots is not mapped here", remedy="")
        memory, scratch = self.cache.memory(job.place.memory_id), None
        if isinstance(job, SaveJob):
            direction, has_digests = CopyDirection.SAVE, True
            items, scratch = self.records.plan_save(memory, job)
        else:
            direction, has_digests = CopyDirection.LOAD, job.wanted is not None
            items = self.records.plan_load(memory, job.moves)
        if not len(items.block) and len(job.moves):
            self._ended.append(_Ended(job, ""))
            return
        ticket = self.engine.submit(
            direction,
            items,
            has_digests=has_digests,
            after=self._find_point(direction, before_forward),
        )
        self._copies[ticket] = _Copy(job, memory, self.records, scratch)

    def _find_point(self, direction: CopyDirection, before_forward: StreamPoint | None) -> Marked:
        """Returns the point in a stream after which a job's copies run; None: they need not wait."""
        if direction is CopyDirection.LOAD and self.settings.has_late_frees:
            return None
        if direction is CopyDirection.LOAD and before_forward is not None:
            return before_forward
        return compute_stream(self._device)

    def _begin_memory(self) -> None:
        """Begins to register the cache's memory with the copy engine, if that wants it."""
        engine: object = self.engine
        if self._host_memory is None and self.cache is not None and isinstance(engine, RegisteringEngine):
            self._host_memory = HostMemory(engine, self.cache)
            self._host_memory.start()

    def _collect(self, engine: CopyEngine) -> None:
        for finished in engine.poll():
            copy = self._copies.pop(finished.ticket)
            self._ended.append(self._settle(copy, finished))

    def _settle(self, copy: _Copy, finished: FinishedCopy) -> _Ended:
        """Returns the report of a copy that has ended, and checks the digests of a load."""
        job, fault = copy.job, finished.fault
        if isinstance(job, SaveJob):
            digests = b"" if finished.digests is None else finished.digests.tobytes()
            return _Ended(job, fault, digests)
        if not fault and finished.digests is not None:
            fault = copy.records.compare(job, finished.digests)
        return _Ended(job, fault, copied_s=0.0 if fault else finished.copied_s)

    def _find_places(self) -> tuple[Place, ...]:
        """Returns where this rank may copy; empty while no tensors are registered, as a copy would fail."""
        if self.cache is None or self.engine is None:
            return ()
        return tuple(Place(*place) for place in self.cache.places())

    def _find_news(self, places: tuple[Place, ...]) -> dict[int, tuple[Place, ...]]:
        """Returns where this rank may copy, if that has changed since it was last reported."""
        if places == self._told:
            return {}
        self._told = places
        if self._host_memory is not None:
            self._host_memory.wake()
        return {self.settings.rank: places}

    def _give_up(self, engine: CopyEngine) -> None:
        """Gives up the copies that a closed engine has not ended. They never will end, and may still touch their slots,
        so the memory is kept."""
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


def _group_facts(geometry: KVGeometry, number: int, stage: int, replicas: Mapping[str, int]) -> GroupFacts:
    group = geometry.groups[number]
    return GroupFacts(
        index=table_of(group.name),
        name=group.name,
        rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
        record_bytes=geometry.record_bytes(group),
        replicas=gcd(*(replicas.get(layer.name, 1) for layer in group.layers if not layer.alias_of)),
        stage=stage,
    )


def _show(job: SaveJob | LoadJob) -> str:
    return f"load of request {job.request_id}" if isinstance(job, LoadJob) else f"save job {job.job}"
