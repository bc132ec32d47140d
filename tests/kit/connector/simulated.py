"""A whole engine in miniature: vLLM's block manager, both sides of the connector, real bytes, any order of events.

The scheduler's loop is cut down to what decides about blocks. A forward writes bytes that are a function of the tokens
they stand for, so every block that a request reads can be checked. Copies are done when the simulation says so.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from random import Random
from typing import Any

import torch
from vllm.v1.request import Request

from kvoffload.cache import needed_blocks
from kvoffload.connector.common.step_plan import StepPlan, WorkerReport
from kvoffload.connector.worker_side import WorkerSettings, WorkerSide
from kvoffload.kvspec import ReuseRule
from tests.kit.connector.engine_configs import make_tensors
from tests.kit.connector.local_client import LocalClient, LocalPlaces
from tests.kit.connector.scripted import Group, ScriptedEngine
from tests.kit.transfer.plain_copy import PlainCopy

MAX_RUNNING = 6
MAX_CHUNK = 24
PATIENCE_STEPS = 500
COPY_TIMEOUT_S = 60.0
EXPECTING = 0.1
"""This share of requests."""


class NothingMovesError(AssertionError):
    """Requests wait for each other."""


class LateWorker(WorkerSide):
    """A worker whose copies are done one at a time, when the test asks for the next one."""

    def __init__(self, settings: WorkerSettings, cache: LocalClient) -> None:
        ranks = settings.sharing.ranks
        super().__init__(settings, lambda register: LocalPlaces(cache), lambda frame: (frame,) * ranks)
        self._late: deque[StepPlan] = deque()
        self._loaded: dict[str, bool] = {}
        self._report = WorkerReport()

    @property
    def owes(self) -> int:
        return len(self._late)

    def submit(self, plan: StepPlan) -> None:
        jobs = [*(StepPlan(saves=(job,)) for job in plan.saves), *(StepPlan(loads=(job,)) for job in plan.loads)]
        self._late.extend(jobs + ([StepPlan(doomed=plan.doomed)] if plan.doomed else []))

    def work(self) -> None:
        plan = self._late.popleft()
        super().submit(plan)
        assert self.engine is not None
        assert self.engine.fence(COPY_TIMEOUT_S)
        finished, failed, report = self.take_results(is_idle=False)
        assert len(finished) + len(report.saved) == len(plan.saves) + len(plan.loads) + len(plan.doomed)
        assert not finished & self._loaded.keys()
        self._loaded.update({name: name not in failed for name in finished})
        self._report = self._report.aggregate(report)

    def take(self) -> tuple[dict[str, bool], WorkerReport]:
        loaded, self._loaded = self._loaded, {}
        report, self._report = self._report, WorkerReport()
        if self.proxy is not None:
            news = self.proxy.report(is_idle=True)
            report = report if news is None else report.aggregate(WorkerReport(nodes={self.node: news}))
        return loaded, report


class SimulatedEngine(ScriptedEngine):
    """Plays an engine, random and repeatable: all choices come from `random`."""

    def __init__(self, *groups: Group, num_blocks: int, random: Random, **options: Any) -> None:
        super().__init__(*groups, num_blocks=num_blocks, **options)
        self.random = random
        self.workers = [self._start(rank) for rank in range(self.ranks)]
        self.worker = self.workers[0]
        assert self.worker.facts is not None
        assert self.worker.facts.places == self.places
        self.copies = [PlainCopy(one.registration.page_map, one.registration.memory) for one in self.workers]
        self._ended: list[dict[str, bool]] = [{} for _ in self.workers]
        """Loads that this rank has ended and another one has not, by rank."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.to_decode: dict[str, int] = {}
        self.arrived = 0
        self.restored_tokens = 0
        self.failed_loads = 0
        self.preemptions = 0

    def _start(self, rank: int) -> LateWorker:
        """One rank with tensors of its own, on a node of its own if there are several."""
        worker = LateWorker(WorkerSettings(rank=rank, sharing=self.sharing), self.caches[self.sharing.node_of(rank)])
        tensors = make_tensors(self.config) if rank else self.tensors
        worker.register(self.geometry, tensors, scale_views={}, identify=_identify)
        if worker.node:
            worker.proxy = self.proxies[worker.node - 1]
        return worker

    def damage_record(self) -> None:
        """One bit of one record that is there now."""
        readable = self.cache.find_readable()
        if readable:
            record = self.cache.record(self.random.choice(readable))
            record[self.random.randrange(len(record))] ^= 1 << self.random.randrange(8)

    # ---- the scheduler's loop ----

    def come(self, tokens: list[int], decode: int) -> None:
        self.arrived += 1
        # Some requests expect blocks of another engine; these never come, and the request waits in vain.
        wishes = {"expect_tokens": len(tokens)} if self.random.random() < EXPECTING else {}
        request = self.arrive(f"r{self.arrived}", tokens, **wishes)
        self.to_decode[request.request_id] = decode
        self.waiting.append(request)

    def turn(self) -> None:
        """Takes one step: running requests, then waiting ones, the plan, the forward, the worker's answers."""
        self._schedule_running()
        self._schedule_waiting()
        scheduled = dict(self._scheduled)
        before = {name: self.requests[name].num_computed_tokens for name in scheduled}
        plan = self.step()
        for name in scheduled:
            self._forward(self.requests[name], before[name])
        for name in scheduled:  # a request may read what another one writes in the same step
            self._check_reads(self.requests[name], before[name])
        for worker in self.workers:
            worker.obey(plan.nodes)
            worker.submit(plan)
            for _ in range(self.random.randint(0, worker.owes)):
                worker.work()
        self._hear()
        for name in scheduled:
            self._sample(self.requests.get(name))

    def abort(self) -> None:
        """Aborts any request, in any state."""
        if self.requests:
            self._end(self.requests[self.random.choice(sorted(self.requests))])

    def lose_cache(self) -> None:
        """The engine's own prefix cache forgets unused blocks."""
        self.pool.evict_blocks({block.block_id for block in self.pool.blocks if not block.ref_cnt and block.block_hash})

    def drain(self) -> None:
        """Lets all requests end; an engine that stops moving fails here."""
        for _ in range(PATIENCE_STEPS):
            owes = any(worker.owes for worker in self.workers)
            if not self.requests and not self.connector.has_pending_push_work() and not owes:
                return
            self.turn()
        raise NothingMovesError(f"nothing moves: {sorted(self.requests)}, {len(self.loading)} loading")

    def _schedule_running(self) -> None:
        for request in list(self.running):
            if request not in self.running:
                continue
            chunk = self.random.randint(1, MAX_CHUNK)
            while not self.run(request, chunk):
                if self.connector.has_pending_block_frees():
                    return
                victim = self.running.pop()
                self.preempt(victim)
                self.preemptions += 1
                self.waiting.appendleft(victim)
                if victim is request:
                    break

    def _schedule_waiting(self) -> None:
        # Requests that hold blocks come first, as in vLLM.
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.num_computed_tokens == 0))
        skipped: list[Request] = []
        while self.waiting and len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            if request.num_computed_tokens:  # loaded
                if not self.run(request, MAX_CHUNK):
                    break
            else:
                admission = self.admit(request, chunk=self.random.randint(1, MAX_CHUNK))
                if admission is None:
                    break
                if not admission.is_known:
                    skipped.append(self.waiting.popleft())
                    continue
                if admission.external:
                    self.restored_tokens += admission.external
                    self.waiting.popleft()
                    continue
            self.running.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(skipped))

    def _hear(self) -> None:
        saves = WorkerReport()
        for ended, worker in zip(self._ended, self.workers, strict=True):
            more, report = worker.take()
            ended.update(more)
            saves = saves.aggregate(report)
        everywhere = [name for name in self._ended[0] if all(name in ended for ended in self._ended)]
        loaded = {name: all(ended[name] for ended in self._ended) for name in everywhere}
        for ended in self._ended:
            for name in everywhere:
                del ended[name]
        failed = [name for name, is_good in loaded.items() if not is_good]
        self.failed_loads += len(failed)
        back = [self.loading[name] for name in loaded if name in self.requests]
        assert saves.failed == frozenset()
        self.report(report=saves, finished=loaded, failed=failed)
        self.waiting.extendleft(back)

    def _sample(self, request: Request | None) -> None:
        if request is None or request.num_computed_tokens < request.num_tokens:
            return
        if self.to_decode[request.request_id] == 0:
            self._end(request)
        else:
            self.to_decode[request.request_id] -= 1
            self.decode(request, self.random.randrange(3))

    def _end(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.finish(request)

    # ---- bytes ----

    def _pattern(self, request: Request, group: int, end: int) -> torch.Tensor:
        """The bytes of a block that ends at this token: a function of the group and of every token before its end."""
        digest = sha256(repr((group, list(request.all_token_ids[:end]))).encode()).digest()
        length = self.geometry.groups[group].record_bytes
        return torch.frombuffer(bytearray(digest * (length // 32 + 1)), dtype=torch.uint8)[:length]

    def _forward(self, request: Request, computed: int) -> None:
        end = request.num_computed_tokens
        tables = self.manager.get_block_ids(request.request_id)
        for group, spec in enumerate(self.geometry.groups):
            if spec.has_recurrent:
                positions = range((end - 1) // spec.block_size, (end - 1) // spec.block_size + 1)
            else:
                positions = range(computed // spec.block_size, (end - 1) // spec.block_size + 1)
            blocks = {position: block for position in positions if (block := tables[group][position])}
            if blocks:
                ends = [min(end, (position + 1) * spec.block_size) for position in blocks]
                rows = torch.stack([self._pattern(request, group, last) for last in ends])
                for copy in self.copies:
                    copy.load(group, list(blocks.values()), rows)

    def _check_reads(self, request: Request, computed: int) -> None:
        """Everything that the next token reads and that is whole blocks holds what these tokens say."""
        tables = self.manager.get_block_ids(request.request_id)
        for group, facts in enumerate(self.parts.groups.facts):
            boundary = computed // facts.rule.block_size * facts.rule.block_size
            if not boundary or (facts.rule.reuse is ReuseRule.EXACT_BOUNDARY and boundary != computed):
                continue
            blocks = {
                position: tables[facts.index][position]
                for position in needed_blocks(facts.rule, local=0, boundary=boundary)
            }
            # The null block: of a window that began after `boundary`, which is before `computed`.
            assert facts.rule.reuse is not ReuseRule.PREFIX or all(blocks.values())
            blocks = {position: block for position, block in blocks.items() if block}
            ends = [(position + 1) * facts.rule.block_size for position in blocks]
            wanted = [self._pattern(request, group, end) for end in ends]
            for copy in self.copies:
                rows = torch.empty((len(blocks), facts.record_bytes), dtype=torch.uint8)
                copy.save(group, list(blocks.values()), rows)
                for position, row, expected in zip(blocks, rows, wanted, strict=True):
                    where = f"{request.request_id}, group {group}, block {position} of {computed}"
                    assert torch.equal(row, expected), where


def _identify(geometry: object) -> _Anybody:
    return _Anybody()


class _Anybody:
    """An identity that is never compared."""

    def fingerprint(self) -> bytes:
        return b"f" * 32

    def describe(self) -> dict[str, object]:
        return {}
