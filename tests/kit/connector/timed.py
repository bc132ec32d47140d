"""A scripted engine on a virtual clock: what a step and a copy truly take is known, and the connector measures it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from vllm.v1.request import Request

from kvoffload.connector.common.step_plan import LoadJob, StepPlan, WorkerReport
from tests.kit.connector.engine_configs import full
from tests.kit.connector.local_client import MEMORY
from tests.kit.connector.scripted import ScriptedEngine

BLOCK_SIZE = 16
STEP_TOKENS = 2048
"""Most tokens that a step computes."""
DECODED = 40
"""Steps of each request after its prompt."""
IDLE_S = 0.002
PATIENCE_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class TrueCosts:
    """Durations of the simulated machine."""

    token_s: float = 50e-6
    free_tokens: int = 0
    """Tokens of prompts that a step with decoding requests computes in no extra time."""
    step_s: float = 0.008
    """Duration of a step without any request."""
    decode_s: float = 0.0002
    """Added for each request that decodes."""
    draft_s: float = 20e-6
    """Added for each draft."""
    load_s: float = 0.0003
    """Duration of a load without a byte."""
    loaded_token_s: float = 5e-6


class _Step(NamedTuple):
    plan: StepPlan
    end_s: float
    is_empty: bool


class TimedEngine(ScriptedEngine):
    """Plays one engine. `is_async`: two steps under way; `drafts` for each request that decodes, all of them right.

    `is_uniproc`: a step without work has no report unless a worker has something to report.
    """

    def __init__(self, costs: TrueCosts, *, is_async: bool, drafts: int, is_uniproc: bool) -> None:
        super().__init__(
            (["a"], full(BLOCK_SIZE)),
            num_blocks=16384,
            max_model_len=8192,
            memory=replace(MEMORY, memory_bytes=32 << 20),
            drafts=drafts,
        )
        self.costs = costs
        self._depth = 2 if is_async else 1
        self._drafts = drafts
        self._is_uniproc = is_uniproc
        self._waiting: deque[Request] = deque()
        self._running: dict[str, int] = {}
        """Steps that each request has decoded."""
        self._under_way: deque[_Step] = deque()
        self._device_free_s = 0.0
        self._link_free_s = 0.0
        self._copies: list[tuple[LoadJob, float, float]] = []
        """When each begins and ends."""

    def true_load_s(self, size_bytes: float) -> float:
        token_bytes = self.geometry.groups[0].record_bytes / BLOCK_SIZE
        return self.costs.load_s + self.costs.loaded_token_s * size_bytes / token_bytes

    def keep(self, prompts: Iterable[list[int]]) -> None:
        """In the pool, and not in the engine's own cache."""
        for number, prompt in enumerate(prompts):
            self.serve(f"kept {number}", prompt)
        self.forget()

    def come(self, name: str, prompt: list[int]) -> None:
        self._waiting.append(self.arrive(name, prompt))

    def work(self) -> None:
        """Goes on until all requests have been served."""
        for _ in range(PATIENCE_STEPS):
            if not self.requests:
                while self._under_way:
                    self._end_step()
                return
            self.turn()
        raise AssertionError("requests wait for ever")

    def turn(self) -> None:
        """Turns as the engine's loop does: it begins a step, and ends the oldest one if no further step may be under
        way."""
        self._begin_step()
        if len(self._under_way) == self._depth or self._under_way[-1].is_empty:
            self._end_step()

    def _begin_step(self) -> None:
        left, prefill, decoding = STEP_TOKENS, 0, 0
        for name in list(self._running):
            request = self.requests[name]
            missing = request.num_prompt_tokens - request.num_computed_tokens
            if missing > 0:
                tokens = min(left, missing)
                prefill += tokens
            else:
                tokens = 1 + self._drafts
                decoding += 1
                for _ in range(tokens):
                    self.decode(request)
                self._running[name] += 1
            if tokens:
                assert self.run(request, tokens)
                left -= tokens
        while self._waiting and left > 0:
            admission = self.admit(self._waiting[0], chunk=left)
            assert admission is not None
            if not admission.is_known:
                break
            request = self._waiting.popleft()
            if not admission.external:
                self._running[request.request_id] = 0
                prefill += self._scheduled[request.request_id]
                left -= self._scheduled[request.request_id]
        is_empty = not self._scheduled
        began_s = self.now_s
        plan = self.step()
        self.now_s = began_s
        for load in plan.loads:
            copy_s = max(began_s, self._link_free_s)
            size_bytes = self.parts.groups.stored_bytes[0] * len(load.moves)
            self._link_free_s = copy_s + self.true_load_s(size_bytes)
            self._copies.append((load, copy_s, self._link_free_s))
        costs = self.costs
        added = max(prefill - costs.free_tokens, 0) if decoding else prefill
        taken_s = costs.step_s + costs.token_s * added + (costs.decode_s + costs.draft_s * self._drafts) * decoding
        end_s = began_s + IDLE_S if is_empty else max(began_s, self._device_free_s) + taken_s
        self._device_free_s = max(self._device_free_s, end_s)
        self._under_way.append(_Step(plan, end_s, is_empty))

    def _end_step(self) -> None:
        step = self._under_way.popleft()
        self.now_s = max(self.now_s, step.end_s)
        copied = {load.request_id: end - begin for load, begin, end in self._copies if end <= self.now_s}
        self._copies = [copy for copy in self._copies if copy[2] > self.now_s]
        plan = StepPlan(saves=step.plan.saves, step=step.plan.step)
        if copied or plan.saves or plan.step or not (step.is_empty and self._is_uniproc):
            self.report(plan, finished=copied, report=WorkerReport(copied_s=copied))
        self._running.update(dict.fromkeys(copied, 0))
        for name in [name for name, decoded in self._running.items() if decoded >= DECODED]:
            del self._running[name]
            self.finish(self.requests[name])


def draw_prompt(random: Random, tokens: int) -> list[int]:
    return [random.randrange(1 << 30) for _ in range(tokens)]
