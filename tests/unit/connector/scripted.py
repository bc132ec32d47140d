"""vLLM's scheduler cut down to the calls that a connector sees, in its order, without an engine process.

Its own KVCacheManager, BlockPool and Request decide about blocks; what workers answer is up to the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvoffload.cache import GroupRule
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.geometry import EngineCache, describe_cache
from kvoffload.connector.step_plan import GroupFacts, StepPlan, WorkerFacts, WorkerReport
from kvoffload.kvspec import KVGeometry
from tests.unit.connector.engine_configs import make_config, make_tensors, make_vllm_config

Group = tuple[Sequence[str], KVCacheSpec]

init_none_hash(sha256)


def make_request(request_id: str, tokens: Iterable[int], *, hash_block_size: int) -> Request:
    return Request(
        request_id,
        list(tokens),
        SamplingParams(max_tokens=64),
        None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def make_facts(geometry: KVGeometry, *, fingerprint: bytes = b"f" * 32) -> WorkerFacts:
    """What a rank that registered this geometry tells the scheduler side."""
    return WorkerFacts(
        fingerprint=fingerprint,
        description={"model": "acme/tiny"},
        groups=tuple(
            GroupFacts(
                index=index,
                name=group.name,
                rule=GroupRule(block_size=group.block_size, reuse=group.reuse_rule, window=group.window),
                record_bytes=group.record_bytes,
            )
            for index, group in enumerate(geometry.groups)
            if group.is_stored
        ),
        num_blocks=geometry.num_blocks,
    )


@dataclass(frozen=True)
class Admission:
    """What the waiting loop got for a request: tokens of the engine's own cache, and tokens to be loaded."""

    local: int
    external: int


class ScriptedEngine:
    """One scheduler. `loading` are requests that wait for a load; a test moves them on with `report`."""

    def __init__(
        self, *groups: Group, num_blocks: int = 128, ranks: int = 1, extra: dict[str, Any] | None = None
    ) -> None:
        self.config = make_config(*groups, num_blocks=num_blocks)
        self.tensors = make_tensors(self.config)
        assert self.config.hash_block_size is not None
        assert self.config.cache_hit_alignment_tokens is not None
        self.hash_block_size = self.config.hash_block_size
        self.block_size = self.config.cache_hit_alignment_tokens
        self.manager = KVCacheManager(
            self.config,
            max_model_len=256,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
        )
        self.pool = self.manager.block_pool
        self.vllm_config = make_vllm_config(extra=extra)
        self.vllm_config.parallel_config.world_size = ranks
        self.connector = KVOffloadConnector(self.vllm_config, KVConnectorRole.SCHEDULER, self.config)
        self.connector.bind_gpu_block_pool(self.pool)
        self.geometry = describe_cache(
            EngineCache(
                config=self.config,
                tensors=self.tensors,
                sharing={},
                layout="LBHNC",
                hash_block_size=self.hash_block_size,
            )
        )
        facts = {(0, rank): make_facts(self.geometry) for rank in range(ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(facts)  # type: ignore[arg-type]
        self.ranks = ranks
        self.reserves_whole_prompts = True
        """vLLM's own `scheduler_reserve_full_isl`."""
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, Request] = {}
        self.all_free = self.pool.get_num_free_blocks()
        self._scheduled: dict[str, int] = {}

    @property
    def side(self) -> Any:
        """The scheduler side, for what only a test may look at."""
        return self.connector._scheduler

    @property
    def pinned(self) -> int:
        return int(self.side._saves._pins.count)

    def arrive(self, request_id: str, tokens: Iterable[int]) -> Request:
        request = make_request(request_id, tokens, hash_block_size=self.hash_block_size)
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
        self.connector.update_state_after_alloc(request, table, external or 0)
        request.num_computed_tokens = local + (external or 0)
        if external:
            self.loading[request.request_id] = request
        else:
            self._scheduled[request.request_id] = tokens
        return Admission(local, external or 0)

    def run(self, request: Request, tokens: int | None = None) -> bool:
        """Schedules a request that has blocks already; False when there are none for it."""
        tokens = self.next_chunk(request, request.num_computed_tokens, tokens)
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        self._scheduled[request.request_id] = tokens
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
        return plan

    def report(
        self,
        *plans: StepPlan,
        finished: Iterable[str] = (),
        failed: Iterable[str] = (),
        bad_saves: bool = False,
        policy: str = "recompute",
        ranks: int | None = None,
    ) -> None:
        """What all ranks say after a step: saves and loads of these plans ended, and these loads too."""
        ended = set(finished) | {load.request_id for plan in plans for load in plan.loads}
        failing = set(failed) | {load.request_id for plan in plans for load in plan.loads if load.is_doomed}
        ended |= failing
        jobs = [save.job for plan in plans for save in plan.saves]
        report = WorkerReport(dict.fromkeys(jobs, ranks or self.ranks), frozenset(jobs if bad_saves else ()))
        waiting_failures = failing & set(self.loading)
        for request_id in waiting_failures:
            self.loading[request_id].num_computed_tokens = 0
            if policy == "fail":
                self.finish(self.loading[request_id])
        self.connector.update_connector_output(
            KVConnectorOutput(
                finished_recving=ended or None,
                failed_recving=failing,
                kv_connector_worker_meta=report if jobs else None,
            )
        )
        for request_id in ended:
            request = self.loading.pop(request_id)
            if request_id in waiting_failures or request_id not in self.requests:
                self.manager.free(request)
            else:
                self.manager.cache_blocks(request, request.num_computed_tokens)

    def preempt(self, request: Request) -> None:
        """No hook is called."""
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._scheduled.pop(request.request_id, None)

    def finish(self, request: Request) -> None:
        """Ended or aborted. Blocks of a load on its way stay until it is reported."""
        self.requests.pop(request.request_id)
        self._scheduled.pop(request.request_id, None)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        blocks = self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        answer = self.connector.request_finished_all_groups(request, blocks)
        assert answer == (False, None)
        if request.request_id not in self.loading:
            self.manager.free(request)

    def serve(self, request_id: str, tokens: Iterable[int], *, chunk: int | None = None) -> list[StepPlan]:
        """A whole request whose saves succeed in the step after: fills the cache."""
        request = self.arrive(request_id, tokens)
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
        stats = self.side.index.stats
        assert (stats.leased_entries, stats.reserved_entries) == (0, 0)
