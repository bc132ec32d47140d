"""vLLM's core without an accelerator: its own scheduler and block manager, steps in virtual time, virtual ranks."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.ground.accelerator import Share, StepCost
from benchmarks.ground.engine_config import EngineConfig, count_distinct_bytes
from benchmarks.ground.machine import MACHINES, Machine
from benchmarks.ground.rank import Rank
from benchmarks.ground.virtual_copy import Link
from benchmarks.ground.work import Ask, iter_roots

IDLE_S = 0.001
"""vLLM's core sleeps so long when it had nothing to run and has not nothing to do."""
ACCEPTED = 0.7
"""The chance of a draft, if the one before it was right."""
MAX_STEPS = 200_000


class NothingMovesError(RuntimeError):
    """An engine goes on stepping and no request gets a token."""


@dataclass
class Served:
    """A request that was served, with its times in virtual seconds."""

    ask: Ask
    request: Request
    arrived_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


@dataclass(frozen=True)
class Step:
    """One that ran, or did not. Times of hooks are real milliseconds, those of a worker the slowest rank's."""

    begun_s: float
    seconds: float
    tokens: int
    requests: int
    scheduler_ms: float
    scheduler_wall_ms: float
    worker_ms: float
    waited_ms: float
    """The worker's thread waited for so long, in virtual time."""
    engine_ms: float
    """vLLM's own scheduler, its CPU time without the hooks."""
    saved_bytes: int
    """The step's plan handed so many bytes to the links of all ranks."""


@dataclass
class Flight:
    """A step that was launched."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    ready_s: float
    seconds: float


@dataclass
class Run:
    """The results of some work."""

    served: list[Served] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual, from the first arrival to the last token."""
    real_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(one.ask.answer) for one in self.served)

    def append(self, run: Run) -> None:
        """Adds a run that follows this one; its times go on from this one's end."""
        self.served += run.served
        self.steps += [replace(step, begun_s=step.begun_s + self.seconds) for step in run.steps]
        self.seconds += run.seconds
        self.real_s += run.real_s


class VirtualEngine:
    """Owned by one thread. `between_steps` hears how long the step before took, and may wait in reality."""

    def __init__(self, config: EngineConfig, *, between_steps: Callable[[float], None] = lambda seconds: None) -> None:
        self.config = config
        self.machine = Machine.of(config.model.ranks)
        self.machine.record_bytes = count_distinct_bytes(config)
        self.machine.cache = config.worker
        self.between_steps = between_steps
        hash_function = get_hash_fn_by_name(config.vllm.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(config.hash_block_size, hash_function)
        self._cost = StepCost(config.model)
        self.ranks: list[Rank] = []
        if config.vllm.kv_transfer_config is not None:
            MACHINES[str(config.vllm.kv_transfer_config.engine_id)] = self.machine
            self.ranks = [Rank(config, number) for number in range(config.model.ranks)]
            self._register()
        self.scheduler: Scheduler = (AsyncScheduler if config.settings.is_async else Scheduler)(
            vllm_config=config.vllm,
            kv_cache_config=config.scheduler,
            structured_output_manager=StructuredOutputManager(config.vllm),
            block_size=config.block_size,
            hash_block_size=config.hash_block_size,
            log_stats=False,
        )
        # Which it serves is the platform's matter otherwise.
        self.scheduler.use_v2_model_runner = config.settings.runner == 2
        self._aggregator: KVOutputAggregator | None = None
        if self.ranks:
            connector: Any = self.scheduler.connector
            metadata = {
                rank.place: facts
                for rank in self.ranks
                if (facts := rank.connector.get_handshake_metadata()) is not None
            }
            if metadata:
                connector.set_xfer_handshake_metadata_pp_aware(metadata)
            self._aggregator = KVOutputAggregator.from_connector(connector, len(self.ranks))
        for watch in (self.machine.scheduler, *self.machine.workers):
            watch.spent.take()  # of the start
        self.queue: deque[Flight] = deque()
        self._chance = random.Random(7)
        self._told: dict[str, int] = {}
        """Tokens that a request's answer has so far, by what was sampled."""
        self._under_way: dict[str, Served] = {}
        self._run = Run()
        self._begun_s = 0.0

    def _register(self) -> None:
        """Ranks meet in it."""
        turn = self.machine.meeting.turn

        def take_turn(rank: Rank) -> None:
            with turn:
                rank.register()

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            list(threads.map(take_turn, self.ranks))

    # ---- from outside ----

    def serve(self, asks: Sequence[Ask]) -> Run:
        """All of them to their last token, and until the connector has nothing on its way any more."""
        real_s, self._run = time.perf_counter(), Run()
        self._begun_s = begun_s = self.machine.clock.now_s
        followers: dict[Ask, list[Ask]] = {}
        for ask in asks:
            if ask.after is not None:
                followers.setdefault(ask.after, []).append(ask)
        coming = [(begun_s + ask.arrival_s, number, ask) for number, ask in enumerate(iter_roots(asks))]
        heapq.heapify(coming)
        number = len(coming)
        for _ in range(MAX_STEPS):
            clock = self.machine.clock
            while coming and coming[0][0] <= clock.now_s:
                at_s, _, ask = heapq.heappop(coming)
                self.arrive(ask, at_s)
            if not self.scheduler.has_requests() and not self.queue:
                if not coming:
                    break
                clock.reach(coming[0][0])
                continue
            for ended in self.step():
                for ask in followers.get(ended.ask, ()):
                    number += 1
                    heapq.heappush(coming, (ended.ended_s + ask.arrival_s, number, ask))
        else:
            raise NothingMovesError(f"{len(self._under_way)} requests after {MAX_STEPS} steps")
        run = self._run
        run.seconds = max((one.ended_s for one in run.served), default=begun_s) - begun_s
        run.real_s = time.perf_counter() - real_s
        return run

    def forget(self) -> bool:
        """Drops what the engine itself has cached. False: a block is held."""
        return bool(self.scheduler.reset_prefix_cache())

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()
        if self.config.vllm.kv_transfer_config is not None:
            del MACHINES[str(self.config.vllm.kv_transfer_config.engine_id)]

    # ---- a step ----

    def arrive(self, ask: Ask, at_s: float) -> None:
        extra = None if ask.wishes is None else {"kv_transfer_params": dict(ask.wishes)}
        sampling = SamplingParams(temperature=0, max_tokens=len(ask.answer), ignore_eos=True, extra_args=extra)
        request = Request(ask.name, ask.prompt, sampling, None, arrival_time=at_s, block_hasher=self._hasher)
        self._under_way[ask.name] = Served(ask, request, at_s)
        self._told[ask.name] = 0
        self.scheduler.add_request(request)

    def step(self) -> list[Served]:
        """`step_with_batch_queue`, or `step`: who has ended."""
        clock = self.machine.clock
        depth = self.config.vllm.max_concurrent_batches
        cpu_ns, begun_s, launched = time.thread_time_ns(), clock.now_s, None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            engine_ns = time.thread_time_ns() - cpu_ns
            launched = self.launch(output)
            has_run = output.total_num_scheduled_tokens > 0
            self.queue.append(launched)
            cpu_ns = time.thread_time_ns() - engine_ns
        is_full = len(self.queue) >= depth or (
            launched is not None and not has_run and not self.scheduler.has_requests()
        )
        ended: list[Served] = []
        if launched is None or is_full:
            flight = self.queue.popleft()
            clock.reach(flight.ready_s)
            ended = self._take(self.scheduler.update_from_output(flight.output, flight.result))
            if not self.config.settings.is_async and self.config.settings.drafts and flight.output.num_scheduled_tokens:
                self._draft(flight.output)
        engine_ns = time.thread_time_ns() - cpu_ns
        hooks_ns, wall_ns = self.machine.scheduler.spent.take()
        clock.pass_time(hooks_ns / 1e9)
        if launched is not None:
            self._note(launched, begun_s, engine_ns - hooks_ns, hooks_ns, wall_ns)
            if not has_run and self.scheduler.has_requests():
                clock.pass_time(IDLE_S)
        return ended

    def launch(self, output: SchedulerOutput) -> Flight:
        shares = self._find_shares(output)
        drafts = self.config.settings.drafts if output.scheduled_spec_decode_tokens else 0
        seconds = self._cost.seconds(shares, drafts=drafts)
        # The tokens that this step samples are told later: until then the model alone knows them.
        result = self._sample(output)
        reports, machine = [], self.machine
        ends: list[float] = []
        handed_s = machine.clock.now_s
        for rank, link, watch in zip(self.ranks, machine.links, machine.workers, strict=False):
            if rank.place[1] == 0:
                # The stage before hands over what it has computed.
                handed_s = max(ends, default=handed_s)

            def launch(link: Link = link, handed_s: float = handed_s) -> None:
                link.forwards.run(seconds, not_before_s=max(link.worker.now_s, handed_s))

            link.worker.reach(machine.clock.now_s)
            report = rank.step(output, launch)
            link.worker.pass_time(watch.spent.cpu_ns / 1e9)
            reports.append(ModelRunnerOutput([], {}, kv_connector_output=report))
            ends.append(link.forwards.free_s if shares else link.worker.now_s)
        if not self.ranks:
            for link in machine.links[:: self.config.model.tensor_ranks]:
                if shares:
                    handed_s = link.forwards.run(seconds, not_before_s=handed_s)
            ends.append(handed_s)
        if self._aggregator is not None:
            aggregated = self._aggregator.aggregate(reports)
            assert aggregated is not None
            result.kv_connector_output = aggregated.kv_connector_output
        if not self.config.settings.is_async:
            # The worker itself waits for what was sampled.
            for link in machine.links:
                link.worker.reach(max(ends))
        self.between_steps(seconds or IDLE_S)
        return Flight(output, result, max(ends), seconds)

    def _find_shares(self, output: SchedulerOutput) -> list[Share]:
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [Share(tokens, computed[name]) for name, tokens in output.num_scheduled_tokens.items()]

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            is_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            if self.config.settings.is_async:
                is_chunk = request.is_prefill_chunk
            if is_chunk:
                sampled.append([])
                continue
            wanted = 1
            for _ in output.scheduled_spec_decode_tokens.get(name, ()):
                if self._chance.random() > ACCEPTED:
                    break
                wanted += 1
            answer, told = self._under_way[name].ask.answer, self._told[name]
            # A step that began before the last token was known samples beyond the end.
            sampled.append([answer[min(told + at, len(answer) - 1)] for at in range(wanted)])
            self._told[name] = told + wanted
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled_token_ids=sampled)

    def _draft(self, output: SchedulerOutput) -> None:
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        drafts = [[1] * self.config.settings.drafts for _ in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _take(self, outputs: Any) -> list[Served]:
        ended, now_s = [], self.machine.clock.now_s
        for one in outputs[0].outputs if 0 in outputs else ():
            served = self._under_way[one.request_id]
            if one.new_token_ids and not served.first_s:
                served.first_s = now_s
            if one.prefill_stats is not None:
                served.cached_tokens = one.prefill_stats.num_cached_tokens
                served.external_tokens = one.prefill_stats.num_external_cached_tokens
            if one.finish_reason is not None:
                served.ended_s = now_s
                del self._under_way[one.request_id], self._told[one.request_id]
                self._run.served.append(served)
                ended.append(served)
        return ended

    def _note(self, flight: Flight, begun_s: float, engine_ns: int, hooks_ns: int, wall_ns: int) -> None:
        machine = self.machine
        worker_ns = max((watch.spent.take()[0] for watch in machine.workers), default=0)
        waited_s = max((engine.take_wait() for engine in machine.engines.values()), default=0.0)
        self._run.steps.append(
            Step(
                begun_s=begun_s - self._begun_s,
                seconds=flight.seconds,
                tokens=flight.output.total_num_scheduled_tokens,
                requests=len(flight.output.num_scheduled_tokens),
                scheduler_ms=hooks_ns / 1e6,
                scheduler_wall_ms=wall_ns / 1e6,
                worker_ms=worker_ns / 1e6,
                waited_ms=waited_s * 1e3,
                engine_ms=engine_ns / 1e6,
                saved_bytes=sum(engine.take_saved() for engine in machine.engines.values()),
            )
        )
