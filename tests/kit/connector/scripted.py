"""vLLM's scheduler cut down to the calls that a connector sees, in its order, without an engine process.

Its own KVCacheManager, BlockPool and Request decide about blocks; what workers answer is up to the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvoffload.cache import CacheSettings, GroupRule
from kvoffload.connector import facade
from kvoffload.connector.common.step_plan import (
    GroupFacts,
    LoadJob,
    Place,
    SaveJob,
    StepPlan,
    WeightDigests,
    WorkerFacts,
    WorkerReport,
)
from kvoffload.connector.engine.geometry import EngineCache, describe_cache, table_of
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.identity.agreement import agree, make_register, name_node
from kvoffload.connector.nodes.node_proxy import NodeProxy
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.connector.scheduler_side import SchedulerSide
from kvoffload.connector.start_up import EngineStart
from kvoffload.kvspec import KVGeometry
from kvoffload.protocol import Register
from tests.kit.connector.engine_configs import full, make_config, make_tensors, make_vllm_config, window
from tests.kit.connector.local_client import MEMORY, LocalClient, StockedClient

Group = tuple[Sequence[str], KVCacheSpec]

init_none_hash(sha256)


DIGEST_BYTES = 16
STEP_S = 0.125
"""Seconds that a step takes by the scheduler side's clock."""


def make_request(
    request_id: str, tokens: Iterable[int], *, hash_block_size: int, wishes: dict[str, Any] | None = None
) -> Request:
    extra = {} if wishes is None else {"kv_transfer_params": wishes}
    return Request(
        request_id,
        list(tokens),
        SamplingParams(max_tokens=64, extra_args=extra),
        None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def make_facts(
    geometry: KVGeometry,
    *,
    rank: int = 0,
    fingerprint: bytes = b"f" * 32,
    places: Sequence[Place] = (),
    replicas: int = 1,
    stage: int = 0,
) -> WorkerFacts:
    """Facts that a rank tells the scheduler side when it has registered this geometry."""
    return WorkerFacts(
        rank=rank,
        fingerprint=fingerprint,
        description={"model": "acme/tiny"},
        groups=tuple(
            GroupFacts(
                index=table_of(group.name),
                name=group.name,
                rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
                record_bytes=group.record_bytes,
                replicas=replicas,
                stage=stage,
            )
            for group in geometry.groups
            if group.is_stored
        ),
        num_blocks=geometry.num_blocks,
        cache_bytes=sum(allocation.size_bytes for allocation in geometry.allocations),
        claims=(("page", 1000), ("padding", 10), ("exclusion", 0)),
        places=tuple(places),
    )


class Move(NamedTuple):
    """One block of a job."""

    group: int
    block: int
    address: int


def list_moves(*jobs: LoadJob | SaveJob) -> list[Move]:
    return [
        Move(*move)
        for job in jobs
        for move in zip(job.moves.groups.tolist(), job.moves.blocks.tolist(), job.moves.addresses.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Admission:
    """A request's admission: tokens of the engine's own cache, and tokens that will be loaded."""

    local: int
    external: int
    is_known: bool = True
    """False: the connector does not know yet, and nothing was allocated."""


class ScriptedEngine:
    """Plays one scheduler. `loading` are requests that wait for a load; a test moves them on with `report`."""

    def __init__(
        self,
        *groups: Group,
        num_blocks: int = 128,
        ranks: int = 1,
        stages: Sequence[Sequence[Group]] = (),
        replicas: int = 1,
        memory: CacheSettings = MEMORY,
        retention_interval: int | None = None,
        extra: dict[str, Any] | None = None,
        role: str = "kv_both",
        round_steps: int = 1,
        gathered_tokens: int = 1,
        max_model_len: int = 256,
        drafts: int = 0,
        drops_last_block: bool = False,
        drafting_group: int | None = None,
        weights: WeightDigests | None = None,
        nodes: int = 1,
        context_ranks: int = 1,
    ) -> None:
        """`weights`: what each rank says of them. `nodes`: machines that the ranks are on. `drafting_group`: the one
        that vLLM knows to have what drafts. `stages`: what each stage of a pipeline has of the groups, one without
        layers where it has none; a stage has so many `ranks`. `context_ranks`: ranks among which the tokens of a block
        are striped."""
        self.config = make_config(*groups, num_blocks=num_blocks, context_ranks=context_ranks)
        if drafting_group is not None:
            self.config.kv_cache_groups[drafting_group].is_eagle_group = True
        self.config.prefix_cache_retention_interval = retention_interval
        self.tensors = make_tensors(self.config)
        assert self.config.hash_block_size is not None
        assert self.config.cache_hit_alignment_tokens is not None
        self.hash_block_size = self.config.hash_block_size
        self.block_size = self.config.cache_hit_alignment_tokens
        self.manager = KVCacheManager(
            self.config,
            max_model_len=max_model_len,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            use_eagle=drops_last_block,
            dcp_world_size=context_ranks,
        )
        self.pool = self.manager.block_pool
        self.now_s = 0.0
        self.vllm_config = make_vllm_config(extra=extra, role=role)
        self.vllm_config.parallel_config.tensor_parallel_size = ranks
        self.vllm_config.parallel_config.pipeline_parallel_size = max(len(stages), 1)
        self.vllm_config.parallel_config.nnodes_within_dp = nodes
        self.vllm_config.parallel_config.decode_context_parallel_size = context_ranks
        self.vllm_config.speculative_config = SimpleNamespace(
            num_speculative_tokens=drafts, use_eagle_block_drop=lambda: drops_last_block
        )
        self.vllm_config.cache_config.prefix_cache_retention_interval = retention_interval
        scheduler_settings = EngineStart.scheduler_settings
        with (
            patch.object(
                EngineStart, "open_for_scheduler", lambda start, register, engine, on_event: self.open_cache(register)
            ),
            patch.object(
                EngineStart,
                "scheduler_settings",
                lambda start: replace(
                    scheduler_settings(start), round_steps=round_steps, gathered_tokens=gathered_tokens
                ),
            ),
            patch.object(facade, "SchedulerSide", partial(SchedulerSide, clock=lambda: self.now_s)),
        ):
            self.connector = KVOffloadConnector(self.vllm_config, KVConnectorRole.SCHEDULER, self.config)
        self.connector.bind_gpu_block_pool(self.pool)
        self.geometry = self._describe(self.config, self.tensors)
        self.sharing = self.side.settings.sharing
        geometries = [self.geometry]
        if stages:
            configs = [make_config(*stage, num_blocks=num_blocks) for stage in stages]
            geometries = [self._describe(config, make_tensors(config)) for config in configs]
        facts = {
            (stage, rank): make_facts(geometry, rank=stage * ranks + rank, stage=stage, replicas=replicas)
            for stage, geometry in enumerate(geometries)
            for rank in range(ranks)
        }
        facts = {name: replace(rank, weights=weights or WeightDigests()) for name, rank in facts.items()}
        engine = agree(facts, self.sharing)
        self.former: list[LocalClient] = []
        """Of sessions that the engine has left, for one in which ranks store apart what they do not have in common."""
        self._memory = memory
        names = [name_node(engine.fingerprint, node, nodes) for node in range(nodes)]
        registers = [make_register(name, engine.groups, self.sharing) for name in names]
        self.cache = LocalClient(registers[0], memory)
        """The one on the scheduler's node."""
        self.caches = [self.cache, *(StockedClient(register, memory) for register in registers[1:])]
        self.proxies = [NodeProxy(cache, groups=len(engine.groups)) for cache in self.caches[1:]]
        facts = {name: self._join(rank) for name, rank in facts.items()}
        self.connector.set_xfer_handshake_metadata_pp_aware(facts)  # type: ignore[arg-type]
        self.ranks = len(facts)
        self.reserves_whole_prompts = True
        """vLLM's own `scheduler_reserve_full_isl`."""
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, Request] = {}
        self.all_free = self.pool.get_num_free_blocks()
        self.told: dict[str, dict[str, Any] | None] = {}
        """Transfer parameters that go to the client with the answer, by ended request."""
        self._scheduled: dict[str, int] = {}
        self._parts_of: Sequence[GroupFacts] = ()
        self._rank_parts: list[RankPart] = []
        """By rank, of the groups as they are stored now."""
        self.part_of(0)
        self._reported: dict[int, int] = {}
        """How many ranks have reported a save job, by job."""

    def open_cache(self, register: Register) -> LocalClient:
        if register.fingerprint != self.cache.register.fingerprint:
            self.former.append(self.cache)
            self.cache = LocalClient(register, self._memory)
        return self.cache

    def _describe(self, config: KVCacheConfig, tensors: dict[str, torch.Tensor]) -> KVGeometry:
        return describe_cache(
            EngineCache(
                config=config,
                tensors=tensors,
                sharing={},
                layout="LBHNC",
                hash_block_size=self.hash_block_size,
                context_ranks=self.vllm_config.parallel_config.decode_context_parallel_size,
            )
        )

    def _join(self, rank: WorkerFacts) -> WorkerFacts:
        """Joins the cache of the rank's node, and returns the rank's report of it."""
        node = self.sharing.node_of(rank.rank)
        is_lowest = node > 0 and rank.rank % self.sharing.node_ranks == 0
        report = self.proxies[node - 1].begin() if is_lowest else None
        return replace(rank, places=tuple(Place(*place) for place in self.caches[node].places()), node_report=report)

    @property
    def side(self) -> Any:
        """The scheduler side, for what only a test may look at."""
        return self.connector.scheduler_side

    @property
    def parts(self) -> Any:
        """The parts of the scheduler side."""
        return self.side.parts

    @property
    def places(self) -> tuple[Place, ...]:
        """Where workers that have joined everything may copy."""
        return tuple(Place(*place) for place in self.cache.places())

    def list_ready(self) -> list[int]:
        """Slots that are held ready of each other node."""
        groups = range(len(self.parts.groups))
        return [sum(map(node.count_ready, groups)) for node in self.parts.nodes.others] if self.proxies else []

    @property
    def pinned(self) -> int:
        return int(self.parts.pins.count)

    def arrive(self, request_id: str, tokens: Iterable[int], **wishes: Any) -> Request:
        request = make_request(request_id, tokens, hash_block_size=self.hash_block_size, wishes=wishes or None)
        self.requests[request_id] = request
        self.connector.on_new_request(request)
        return request

    def match(self, request: Request) -> int | None:
        """The question alone, as often as a test likes."""
        _, local, _ = self.manager.get_computed_blocks(request)
        external, is_async = self.connector.get_num_new_matched_tokens(request, local - local % self.block_size)
        assert is_async == bool(external)
        return external

    def next_chunk(self, request: Request, computed: int, chunk: int | None) -> int:
        """Tokens of the next step. With recurrent groups vLLM ends each at a block, the last but one at the last."""
        end = min(request.num_tokens, computed + (chunk or request.num_tokens))
        stop = (request.num_tokens - 1) // self.block_size * self.block_size
        if self.geometry.groups[0].has_recurrent and computed < stop:
            end = min(stop, max(end, computed + self.block_size)) // self.block_size * self.block_size
        return end - computed

    def admit(self, request: Request, *, chunk: int | None = None) -> Admission | None:
        """One turn of the waiting loop; None when the engine has no blocks for it."""
        assert request.num_computed_tokens == 0
        blocks, local, _ = self.manager.get_computed_blocks(request)
        external, _ = self.connector.get_num_new_matched_tokens(request, local)
        if external is None:
            return Admission(local, 0, is_known=False)
        if external:
            slots = self.manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=local,
                new_computed_blocks=blocks,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
                full_sequence_must_fit=self.reserves_whole_prompts,
            )
        else:
            tokens = self.next_chunk(request, local, chunk)
            slots = self.manager.allocate_slots(
                request, tokens, num_new_computed_tokens=local, new_computed_blocks=blocks
            )
        if slots is None:
            return None
        table = self.manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, table, external)
        request.num_computed_tokens = local + external
        if external:
            self.loading[request.request_id] = request
        else:
            self._scheduled[request.request_id] = tokens
        return Admission(local, external)

    def run(self, request: Request, tokens: int | None = None, *, drafts: int = 0) -> bool:
        """Schedules a request that has blocks already, with so many drafts after its tokens; False when there are no
        blocks for it."""
        tokens = self.next_chunk(request, request.num_computed_tokens, tokens)
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        self._scheduled[request.request_id] = tokens + drafts
        return True

    def decode(self, request: Request, token: int = 7) -> None:
        request.append_output_token_ids(token)

    def step(self, *, offers: dict[str, list[tuple[int, int, int]]] | None = None) -> StepPlan:
        """Plans the step and advances what was scheduled in it. `offers` replace the engine's own."""
        scheduled, self._scheduled = self._scheduled, {}
        own_offers = self.manager.take_boundary_state_offloads()
        offers = own_offers if offers is None else offers
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids={*scheduled, *(name for name in offers if name in self.requests)},
            resolve_block_ids=self.manager.get_block_ids,
            boundary_state_offloads=offers,
        )
        plan = self.connector.build_connector_meta(output)
        assert isinstance(plan, StepPlan)
        for request_id, tokens in scheduled.items():
            self.requests[request_id].num_computed_tokens += tokens
        self.manager.new_step_starts()
        self.now_s += STEP_S
        return plan

    def report(
        self,
        *plans: StepPlan,
        finished: Iterable[str] = (),
        failed: Iterable[str] = (),
        bad_saves: bool = False,
        policy: str = "recompute",
        ranks: int | None = None,
        report: WorkerReport | None = None,
    ) -> None:
        """Reports for all ranks after a step: it ended, with saves and loads of these plans, and these loads too.

        With `ranks` so many of them say so, in their order. A `report` of real workers is passed on.
        """
        ended = set(finished) | {load.request_id for plan in plans for load in plan.loads}
        failing = set(failed) | {request_id for plan in plans for request_id in plan.doomed}
        ended |= failing
        report = report or WorkerReport()
        report = replace(report, step=max((plan.step for plan in plans), default=report.step))
        for save in (save for plan in plans for save in plan.saves):
            report = report.aggregate(self._end_save(save, ranks, is_bad=bad_saves))
        waiting_failures = failing & set(self.loading)
        for request_id in waiting_failures:
            self.loading[request_id].num_computed_tokens = 0
            if policy == "fail":
                self.finish(self.loading[request_id])
        self.hear(report, finished=ended, failed=failing)
        for request_id in ended:
            request = self.loading.pop(request_id)
            if request_id in waiting_failures or request_id not in self.requests:
                self.manager.free(request)
            else:
                self.manager.cache_blocks(request, request.num_computed_tokens)

    def hear(self, report: WorkerReport, *, finished: Iterable[str] = (), failed: Iterable[str] = ()) -> None:
        """Calls the hook alone."""
        self.connector.update_connector_output(
            KVConnectorOutput(
                finished_recving=set(finished) or None,
                failed_recving=set(failed),
                kv_connector_worker_meta=None if report.is_empty else report,
            )
        )

    def _end_save(self, save: SaveJob, ranks: int | None, *, is_bad: bool) -> WorkerReport:
        job, first = save.job, self._reported.get(save.job, 0)
        last = first + (ranks or self.ranks)
        self._reported[job] = last
        digests = {
            rank: bytes(DIGEST_BYTES * part.run * int(part.find_digested(save).sum()))
            for rank, part in ((rank, self.part_of(rank)) for rank in range(first, last))
            if not is_bad
        }
        return WorkerReport({job: last - first}, frozenset([job] if is_bad else ()), {job: digests} if digests else {})

    def part_of(self, rank: int) -> RankPart:
        """The part of a block that this rank has, as the engine stores it now."""
        groups = self.parts.groups.facts
        if self._parts_of is not groups:
            self._parts_of = groups
            self._rank_parts = [RankPart.find(one, groups, self.sharing) for one in range(self.ranks)]
        return self._rank_parts[rank]

    def preempt(self, request: Request) -> None:
        """Preempts a request; no hook is called."""
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._scheduled.pop(request.request_id, None)

    def finish(self, request: Request) -> None:
        """Ends a request, as when it is aborted. Blocks of a load on its way stay until it is reported."""
        self.requests.pop(request.request_id)
        self._scheduled.pop(request.request_id, None)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        blocks = self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        is_delayed, self.told[request.request_id] = self.connector.request_finished_all_groups(request, blocks)
        assert not is_delayed
        if request.request_id not in self.loading:
            self.manager.free(request)

    def serve(
        self, request_id: str, tokens: Iterable[int], *, chunk: int | None = None, **wishes: Any
    ) -> list[StepPlan]:
        """A whole request whose saves succeed in the step after: fills the cache."""
        request = self.arrive(request_id, tokens, **wishes)
        admission = self.admit(request, chunk=chunk)
        assert admission is not None
        plans = [self.step()]
        if admission.external:
            self.report(plans[0])
        while request.num_computed_tokens < request.num_tokens:
            assert self.run(request, chunk)
            plans.append(self.step())
        self.report(*(StepPlan(saves=plan.saves) for plan in plans))
        self.finish(request)
        return plans

    def forget(self) -> None:
        """The engine's own prefix cache is emptied, which works only if no block is held."""
        assert self.manager.reset_prefix_cache()

    def assert_at_rest(self) -> None:
        """No fault was hidden, and every block, pin, lease and slot has come back."""
        assert self.connector.faults == {}
        assert self.pool.get_num_free_blocks() == self.all_free
        assert self.pinned == 0
        assert not self.connector.has_pending_push_work()
        stats = self.cache.stats()
        assert (stats.leases, stats.reserved) == (0, 0)
        for cache, ready in zip(self.caches[1:], self.list_ready(), strict=True):
            stats = cache.stats()
            assert (stats.leases, stats.reserved) == (0, ready)
        assert self.parts.saves.blocks_under_way == 0


def two_groups(num_blocks: int = 32, rank: int = 0) -> WorkerFacts:
    """Returns what a worker says of a model with a full and a window group."""
    config = make_config((["a", "b"], full(4)), (["c", "d"], window(4)), num_blocks=num_blocks)
    cache = EngineCache(config=config, tensors=make_tensors(config), sharing={}, layout="LBHNC", hash_block_size=4)
    return make_facts(describe_cache(cache), rank=rank)
