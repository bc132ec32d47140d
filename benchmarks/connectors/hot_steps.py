"""A scheduler side over a real private server and client, driven without an engine: vLLM's own block manager and
requests, the hooks in the engine's order, and workers that have done everything one step later."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_none_hash_seed
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.connectors.model import LAYERS, TOKEN_BYTES
from benchmarks.connectors.steps import (
    BLOCK_TOKENS,
    NEW_TOKENS,
    STEP_TOKENS,
    Sample,
    count_full,
    make_arrivals,
)
from kvoffload.bench.child import answer_commands, say_ready
from kvoffload.cache import GroupRule
from kvoffload.client import Client
from kvoffload.config.sources import load_settings
from kvoffload.connector.common.step_plan import GroupFacts, Place, StepPlan, WorkerFacts, WorkerReport
from kvoffload.connector.identity.agreement import EngineFacts, SharingSettings
from kvoffload.connector.scheduler_side import SchedulerSettings, SchedulerSide
from kvoffload.engines.cache_access import CacheAccess
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Register, Role
from kvoffload.protocol.message import Event

NUM_BLOCKS = (1 << 30) // (BLOCK_TOKENS * TOKEN_BYTES)
DIGEST_BYTES = 16
JOIN_S = 30.0
ANY_TOKEN = 7
FINGERPRINT = b"f" * 32


def _make_cache_config() -> KVCacheConfig:
    import torch

    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])


class HotScheduler:
    """One thread's."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._manager = KVCacheManager(
            _make_cache_config(), max_model_len=1024, scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS
        )
        sharing = SharingSettings(
            hash_block_size=BLOCK_TOKENS,
            hash_algorithm="sha256",
            hash_seed=str(resolve_none_hash_seed(sha256)),
            tensor_ranks=1,
        )
        settings = load_settings(engine={"memory": "2GiB"}).settings
        name = f"hot-steps-{time.monotonic_ns()}"
        access = CacheAccess(settings=settings, engine=name, machine_key=name)
        self._clients: list[Client] = []

        def open_cache(
            register: Register, engine: EngineFacts, on_event: Callable[[Event, int], None] | None
        ) -> Client:
            self._clients = [
                access.open(register, role=role, on_event=on_event) for role in (Role.WORKER, Role.SCHEDULER)
            ]
            for client in self._clients:
                if not client.wait_until_served(JOIN_S):
                    raise BenchmarkError(f"the server does not serve: {client.fault}", remedy="see its log")
            return self._clients[1]

        self._side = SchedulerSide(SchedulerSettings(sharing=sharing, hit_alignment=BLOCK_TOKENS), open_cache)
        self._side.bind_pool(self._manager.block_pool)
        rule = GroupRule(block_size=BLOCK_TOKENS, reuse=ReuseRule.PREFIX)
        group = GroupFacts(index=0, name="full", rule=rule, record_bytes=BLOCK_TOKENS * TOKEN_BYTES)
        facts = WorkerFacts(
            rank=0,
            fingerprint=FINGERPRINT,
            description={},
            groups=(group,),
            num_blocks=NUM_BLOCKS,
            cache_bytes=1 << 30,
        )
        self._side.accept_facts({(0, 0): facts})
        places = tuple(Place(*place) for place in self._clients[0].places())
        self._side.end_transfers(set(), set(), WorkerReport(places={0: places}))
        self._spent_s = 0.0
        self._running: dict[str, Request] = {}
        self._plan = StepPlan()

    def measure_steps(self, seed: int, requests: int) -> list[Sample]:
        """Measures the same as `measure_engine_steps`, for the scheduler side alone."""
        samples: list[Sample] = []
        arrivals, number = make_arrivals(seed, requests), 0
        while (now := next(arrivals, None)) is not None or self._running or self._side.has_pending_work:
            self._spent_s = 0.0
            for prompt in now or ():
                number += 1
                self._arrive(f"{seed}-{number}", prompt)
            blocks, is_decode = self._step()
            samples.append((blocks, len(now or ()), self._spent_s, int(is_decode and not now)))
        assert self._manager.reset_prefix_cache()
        return samples

    def close(self) -> None:
        self._side.close()
        self._clients[0].close()

    def _arrive(self, request_id: str, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=NEW_TOKENS)
        request = Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
        self._running[request_id] = request
        self._time(self._side.add_request, request)

    def _step(self) -> tuple[int, bool]:
        """Blocks that became full, and whether it did nothing but decode."""
        scheduled = self._schedule()
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(scheduled), resolve_block_ids=self._manager.get_block_ids, boundary_state_offloads={}
        )
        plan = self._time(self._side.plan_step, output)
        blocks = sum(count_full(self._running[name].num_computed_tokens, tokens) for name, tokens in scheduled.items())
        for name, tokens in scheduled.items():
            self._running[name].num_computed_tokens += tokens
        self._report()
        self._plan = plan
        ended = [self._running[name] for name in scheduled if self._decode(self._running[name])]
        for request in ended:
            table = self._manager.get_block_ids(request.request_id)
            self._time(self._side.end_request, request, table)
            self._manager.free(request)
            del self._running[request.request_id]
        self._manager.new_step_starts()
        return blocks, set(scheduled.values()) == {1} and not ended

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        left = STEP_TOKENS
        for name, request in self._running.items():
            if request.num_computed_tokens == 0 and left:
                _, local, _ = self._manager.get_computed_blocks(request)
                self._time(self._side.match, request, local)
            tokens = min(request.num_tokens - request.num_computed_tokens, left)
            if tokens and self._manager.allocate_slots(request, tokens) is not None:
                if request.num_computed_tokens == 0:
                    self._time(self._side.admit, request)
                scheduled[name] = tokens
                left -= tokens
        return scheduled

    def _report(self) -> None:
        """Reports that the worker has done the jobs of the step before."""
        jobs = self._plan.saves
        digests = {job.job: {0: bytes(DIGEST_BYTES * len(job.moves))} for job in jobs}
        report = WorkerReport(dict.fromkeys((job.job for job in jobs), 1), digests=digests) if jobs else None
        self._time(self._side.end_transfers, set(), set(), report)

    def _decode(self, request: Request) -> bool:
        """Whether that was its last token."""
        if request.num_computed_tokens < request.num_tokens:
            return False
        if len(request.output_token_ids) + 1 >= NEW_TOKENS:
            return True
        request.append_output_token_ids(ANY_TOKEN)
        return False

    def _time(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.thread_time()
        answer = hook(*args, **kwargs)
        self._spent_s += time.thread_time() - begun_s
        return answer


def main() -> None:
    """Serves commands until the end of the input."""
    side = HotScheduler()
    say_ready()
    answer_commands({"measure_steps": side.measure_steps})
    side.close()
    sys.stdout.flush()
