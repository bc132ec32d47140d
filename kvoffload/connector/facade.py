"""The class that vLLM constructs by name, one in the scheduler and one in each worker: hands each hook to its side.

This is the one place where a fault becomes a miss. After registration nothing that goes wrong here may reach the
engine: it is logged once per kind, counted, and answered as if nothing had been cached.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvoffload.config.sources import load_settings
from kvoffload.connector.common.receipt import Sources
from kvoffload.connector.common.step_plan import UNASKED, SaveJob, StepPlan, WorkerFacts, WorkerReport
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.geometry import EngineCache, describe_cache, with_scale_views
from kvoffload.connector.engine.kept_groups import find_why_idle
from kvoffload.connector.engine.layer_dtypes import check_layer_dtypes
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.engine.replicas import find_replicas
from kvoffload.connector.engine.stats import ConnectorProm, ConnectorStats
from kvoffload.connector.engine_log import join_engine_log
from kvoffload.connector.identity.engine import describe_engine, refuse_ruined_scales
from kvoffload.connector.identity.weight_watch import WeightWatch
from kvoffload.connector.identity.weights import find_weights
from kvoffload.connector.idle import IdleConnector
from kvoffload.connector.scheduler_side import SchedulerSide
from kvoffload.connector.start_up import EngineStart
from kvoffload.connector.worker_side import WorkerSide
from kvoffload.engines.degrade import degrade
from kvoffload.errors import UnsupportedError, find_code

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MISS: tuple[int | None, bool] = (0, False)
_FREE_NOW: tuple[bool, dict[str, Any] | None] = (False, None)
_NOT_RESET: bool | None = False
_NOBODY: Set[str] = frozenset()


class KVOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector as vLLM sees it, with one side: `scheduler_side` or `worker_side`. Only the engine's threads call
    it; copies have their own. For an engine of which nothing can be kept, an `IdleConnector` is made in its place."""

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        why = find_why_idle(vllm_config, kv_cache_config)
        return IdleConnector(vllm_config, role, kv_cache_config, why=why) if why else super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_engine_log()
        assert vllm_config.kv_transfer_config is not None
        settings = load_settings(engine=vllm_config.kv_transfer_config.kv_connector_extra_config).settings
        start = EngineStart(settings, vllm_config, kv_cache_config)
        self._faults: dict[str, int] = {}
        self.measures = Measures()
        self._loads = StepPlan()
        self._saves: tuple[SaveJob, ...] = ()
        self._report = WorkerReport()
        self._has_forward = False
        self._step = 0
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._weights = WeightWatch(functools.partial(find_weights, vllm_config))
        self._register_again: Callable[[], None] | None = None
        """Registers again the tensors that the engine gave last: vLLM does not give them when it wakes."""
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = self._make_scheduler(start)
        else:
            self.worker_side = self._make_worker(start)

    def _make_scheduler(self, start: EngineStart) -> SchedulerSide:
        side = SchedulerSide(start.scheduler_settings(), start.open_for_scheduler, self.measures)
        vllm_compat.on_sigterm(side.begin_ending)
        return side

    def _make_worker(self, start: EngineStart) -> WorkerSide:
        side = WorkerSide(start.worker_settings(), start.open_for_worker, start.exchange, start.open_for_node)
        start.begin_for_worker()
        return side

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a dropped save is only a later miss, and no request waits for one."""
        return False

    @property
    def faults(self) -> dict[str, int]:
        """How often each hook turned a fault into a miss."""
        return dict(self._faults)

    def note_fault(self, hook: str, fault: Exception) -> None:
        """Counts a fault; the first of a hook is logged with its trace, the rest are counted only."""
        self._faults[hook] = self._faults.get(hook, 0) + 1
        self.measures.count("kvoffload_faults_total", hook=hook)
        self.measures.count("kvoffload_errors_total", code=find_code(fault))
        if self._faults[hook] == 1:
            logger.error("%s: %s (counted from now on, answered as a miss)", hook, fault, exc_info=fault)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the engine's tensors. Raises on any fault: an engine whose cache we cannot account for must not
        start with us."""
        assert self.worker_side is not None
        try:
            self._register(self.worker_side, kv_caches)
        except Exception as fault:
            self.worker_side.withdraw(fault)
            raise

    def _register(self, worker: WorkerSide, kv_caches: dict[str, torch.Tensor]) -> None:
        begun_s = time.monotonic()
        if worker.registration.is_registered:
            worker.unregister()  # the engine has made another cache
        config = self._vllm_config
        cache = EngineCache(
            config=self._kv_cache_config,
            tensors=kv_caches,
            sharing=vllm_compat.find_sharing(config),
            layout=vllm_compat.cache_layout(self._kv_cache_config),
            hash_block_size=vllm_compat.hash_block_size(config, self._kv_cache_config),
            context_ranks=config.parallel_config.decode_context_parallel_size,
        )
        units = worker.settings.sharing.units
        geometry = replace(describe_cache(cache), units=units)
        check_layer_dtypes(config, geometry)
        refuse_ruined_scales(config, geometry)
        scaled = [layer for layer in geometry.layers.values() if layer.quantisation.is_per_token_head]
        owners = [layer.name for layer in scaled if not layer.alias_of]
        views = vllm_compat.create_scale_views(config, kv_caches, owners)
        # Layers that share pages would overwrite the scales in them as well. Their owner has declared the views.
        vllm_compat.create_scale_views(config, kv_caches, [layer.name for layer in scaled if layer.alias_of])
        described = with_scale_views(geometry, views)
        identity = describe_engine(config, described)
        weights = self._weights.take()
        if units is not None:
            # Engines of other sizes cut their tensors otherwise; equal model files prove that weights are equal.
            weights = weights._replace(name=b"")
        register = functools.partial(
            worker.register,
            described,
            kv_caches,
            scale_views=views,
            identify=lambda _: identity,
            weights=weights,
            replicas=find_replicas(config, self._kv_cache_config)
            if units is None
            else dict.fromkeys(described.layers, units.replicas),
        )
        register()
        self._register_again = register
        self.measures.observe("kvoffload_registration_seconds", time.monotonic() - begun_s)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Returns True: the connector can follow an engine's sleep. vLLM 0.33 asks before there is an engine."""
        return True

    @degrade(lambda: None)
    def unregister_kv_caches(self) -> None:
        """Releases the tensors: the engine (vLLM 0.33) is about to sleep or to discard its cache. May be called more
        than once."""
        assert self.worker_side is not None
        self.worker_side.unregister()

    @degrade(lambda: None)
    def restore_kv_caches(self) -> None:
        """Registers the same tensors again: the engine (vLLM 0.33) wakes, and they have memory at the same addresses.

        The engine's identity is kept and not read again, because its scales may not be back yet while it wakes. After a
        fault the engine goes on without us; the handshake that follows tells the scheduler side.
        """
        assert self.worker_side is not None
        if self._register_again is not None and not self.worker_side.registration.is_registered:
            self._register_again()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns this rank's registration, for the scheduler side."""
        return self.worker_side.facts if self.worker_side is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepPlan)
        # Copies that the last step's hooks have not submitted. Its forward is launched by now.
        self._submit_loads()
        self._submit_saves()
        self._loads = replace(connector_metadata, saves=(), nodes={})
        self._saves = connector_metadata.saves
        self._has_forward = connector_metadata.has_forward
        self._step = connector_metadata.step
        if self.worker_side is not None and connector_metadata.nodes:
            self._obey(self.worker_side, connector_metadata)
        if self.worker_side is not None and self._loads.loads:
            self.worker_side.mark()
        if self.worker_side is not None and connector_metadata.sample:
            proof = (connector_metadata.sample, self._weights.take().proof)
            self._report = replace(self._report, weights={self.worker_side.rank: proof})
        elif self.worker_side is not None and connector_metadata.has_forward and self._weights.has_changed():
            self._report = replace(self._report, weights={self.worker_side.rank: (UNASKED, b"")})

    def _obey(self, worker: WorkerSide, plan: StepPlan) -> None:
        """Carries out orders for this node before the forward, so that answers are there when it ends."""
        try:
            worker.obey(plan.nodes)
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("bind_connector_metadata", fault)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submits the plan's loads. They are asynchronous, so vLLM calls this after the forward was launched.

        The arguments are ignored: model runner V2 passes the metadata of only some of its forwards.
        """
        self._submit_loads()

    def wait_for_save(self) -> None:
        """Submits the plan's saves. Never waits: the source blocks are pinned until every rank has reported.

        With speculative decoding vLLM calls this after the draft model's forward, which writes to these blocks too.
        """
        self._submit_saves()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no forward runs on blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are saved after the forward."""

    @degrade(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns loads that ended; ended saves go with the worker's report."""
        assert self.worker_side is not None
        self._submit_loads()
        finished, failed, report = self.worker_side.take_results(is_idle=not self._has_forward)
        self._report = self._report.aggregate(report)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns this rank's report since the last step, with the step's number if the plan had one."""
        report, self._report = self._report, WorkerReport()
        if self._step:
            report, self._step = replace(report, step=self._step), 0
        return None if report.is_empty else report

    def _submit_loads(self) -> None:
        """Submits all but the saves of the bound plan, once, from the hook that comes first."""
        if self.worker_side is not None and not self._loads.is_empty:
            plan, self._loads = self._loads, StepPlan()
            self.worker_side.submit(plan)

    def _submit_saves(self) -> None:
        """Submits the saves of the bound plan, once."""
        if self.worker_side is not None and self._saves:
            saves, self._saves = self._saves, ()
            self.worker_side.submit(StepPlan(saves=saves))

    # ---- scheduler ----

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Takes the ranks' registrations. Raises if they disagree: the engine must not start. vLLM 0.33 calls it again
        when an engine wakes: then it runs, and a registration that has changed is a fault that costs it our cache."""
        assert self.scheduler_side is not None
        facts = {rank: one for rank, one in metadata.items() if isinstance(one, WorkerFacts)}
        if metadata and not facts:
            # vLLM's MultiConnector passes on only its first child's metadata.
            raise UnsupportedError(
                "the ranks reported records of another connector",
                remedy="name KVOffloadConnector first among MultiConnector's connectors",
            )
        is_awake = self.scheduler_side.is_open
        try:
            self.scheduler_side.accept_facts(facts)
        except Exception as fault:
            if not is_awake:
                raise
            self.note_fault("set_xfer_handshake_metadata_pp_aware", fault)

    @degrade(lambda: None)
    def on_new_request(self, request: Request) -> None:
        assert self.scheduler_side is not None
        self.scheduler_side.add_request(request)

    @degrade(lambda: _MISS)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offers asynchronous loads only: a synchronous load that fails has already spoilt the engine's own cache."""
        assert self.scheduler_side is not None
        external = self.scheduler_side.match(request, num_computed_tokens)
        return external, bool(external)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns no groups: a load leaves padding and blocks for speculation unwritten, so the engine zeroes what it
        would zero."""
        return ()

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Returns where the tokens of an accepted hit come from, in vLLM's own terms. vLLM 0.31 does not ask."""
        sources: Sources = ()
        try:
            assert self.scheduler_side is not None
            sources = self.scheduler_side.find_sources(request)
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("get_external_cache_hit_sources", fault)
        return vllm_compat.label_hit(sources, num_external_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Admits a request and queues its load. After a fault the load is reported as failed: the hit was reported, so
        the request would else wait for ever.

        A fault in noting the request for saves does not fail its load.
        """
        assert self.scheduler_side is not None
        try:
            self.scheduler_side.admit(request)
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("update_state_after_alloc", fault)
        if num_external_tokens > 0:
            try:
                self.scheduler_side.plan_load(request, blocks.get_block_ids(), num_external_tokens)
            except Exception as fault:  # noqa: BLE001  (as in degrade)
                self.note_fault("update_state_after_alloc", fault)
                self.scheduler_side.doom_load(request)

    # The engine calls these four in every step, with cold CPU caches: `degrade` would cost a quarter more time.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.scheduler_side is not None
        try:
            return self.scheduler_side.plan_step(scheduler_output)
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("build_connector_meta", fault)
            return self.scheduler_side.rescue_plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        try:
            assert self.scheduler_side is not None
            report = connector_output.kv_connector_worker_meta
            assert report is None or isinstance(report, WorkerReport)
            self.scheduler_side.end_transfers(
                connector_output.finished_recving or _NOBODY,
                getattr(connector_output, "failed_recving", None) or _NOBODY,
                report,
            )
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("update_connector_output", fault)

    @degrade(lambda: _FREE_NOW)
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request. Its blocks are never held back: saves pin their own, and an aborted load is reported like any
        other.

        The answer goes to the client, and through a proxy to the engine that decodes: `expect_tokens` is a wish of our
        own, and that engine ignores the receipt.
        """
        assert self.scheduler_side is not None
        answer: dict[str, Any] = {}
        receipt = self.scheduler_side.find_receipt(request)
        if receipt is not None:
            answer["kvoffload_receipt"] = receipt.describe()
        tokens = self.scheduler_side.end_request(request, block_ids)
        if tokens:
            answer["expect_tokens"] = tokens
        return False, answer or None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @degrade(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Returns whether the engine should wait rather than preempt a request: pins will soon free blocks, or the
        request has blocks that are not saved yet."""
        side = self.scheduler_side
        return side is not None and (side.will_free_blocks or side.save_before_preemption())

    def has_pending_push_work(self) -> bool:
        """Returns whether an idle engine must go on stepping, until every pin is undone and every answer has come."""
        return self.scheduler_side is not None and self.scheduler_side.has_pending_work

    @degrade(lambda: _NOT_RESET)
    def reset_cache(self) -> bool | None:
        """Keeps all blocks saved so far from being used again: the weights have changed, or the user wants a cold
        cache.

        Returns False after a fault, when this is not certain, so that the caller of the reset hears of it.
        """
        if self.scheduler_side is not None:
            self.scheduler_side.clear()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the measurements of this process since the last call; None: there are none, or they are not due."""
        try:
            if not self.measures.is_due and (self.scheduler_side is None or self.scheduler_side.is_busy):
                return None
            if self.scheduler_side is not None:
                self.scheduler_side.note_gauges()
            return self.measures.take()
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("get_kv_connector_stats", fault)
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return ConnectorProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns events about blocks that were stored in or removed from the cache. They are taken here, not lazily by
        vLLM, where a fault would not be caught."""
        try:
            return tuple(self.scheduler_side.take_events()) if self.scheduler_side is not None else ()
        except Exception as fault:  # noqa: BLE001  (as in degrade)
            self.note_fault("take_events", fault)
            return ()

    def shutdown(self) -> None:
        self._register_again = None
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.close()
