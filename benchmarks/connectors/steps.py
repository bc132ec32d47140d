"""What does a step cost in the scheduler's process, by the blocks that become full in it?"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.connectors.accounting import HookClock
from benchmarks.connectors.engine_child import kvoffload, make_prompt, run_engine
from benchmarks.connectors.model import DENSE_86M
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.measure import spread_of

if TYPE_CHECKING:
    from tests.vllm.engine import Engine

RUNS = 3
BLOCK_TOKENS = 32
REQUESTS = 64
SHORTEST, LONGEST = 64, 640
NEW_TOKENS = 160
STEP_TOKENS = 2048
MAX_ARRIVALS = 6
"""In one step: some steps compute a whole prompt, some many."""
ENGINE = {
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 1024,
    "max_num_batched_tokens": STEP_TOKENS,
    "max_num_seqs": REQUESTS,
}

Sample = tuple[int, int, float, int]
"""Of a step: blocks that became full, requests that arrived, seconds in hooks, whether it did nothing but decode."""


@dataclass(frozen=True)
class Fit:
    """`decode_us` is the mean of the steps that only decode; the others are of the plane through all steps."""

    decode_us: float
    intercept_us: float
    request_us: float
    block_ns: float


def fit_steps(samples: Sequence[Sample]) -> Fit:
    """Least squares: a + b x blocks + c x requests. What a step puts off is counted in the step that does it."""
    known = np.array([(1, arrived, blocks) for blocks, arrived, _, _ in samples], float)
    spent_us = np.array([seconds for _, _, seconds, _ in samples]) * 1e6
    intercept, request, block = np.linalg.lstsq(known, spent_us, rcond=None)[0].tolist()
    decoding = [seconds * 1e6 for _, _, seconds, is_decode in samples if is_decode]
    return Fit(statistics.fmean(decoding), intercept, request, block * 1e3)


_ROWS: tuple[tuple[str, str, float | None, Callable[[Fit], float]], ...] = (
    ("a decode step", "us", 30, lambda fit: fit.decode_us),
    ("a new block", "ns", 100, lambda fit: fit.block_ns),
    ("a new request", "us", None, lambda fit: fit.request_us),
    ("the plane at 0", "us", None, lambda fit: fit.intercept_us),
)


def measure_scheduler(folder: Path, progress: Progress) -> Iterator[Result]:
    """Measures real steps, and in turn the same hooks in a hot loop."""
    progress("steps of an engine")
    with run_engine(folder, DENSE_86M.name, kvoffload(memory="2GiB"), **ENGINE) as engine:
        engine.ask("generate", 0, LONGEST, 2)
        real = [fit_steps(engine.ask("measure_steps", 1000 * run, REQUESTS)) for run in range(1, RUNS + 1)]
    progress("the scheduler's side alone")
    with Child("benchmarks.connectors.hot_steps") as side:
        side.ask("measure_steps", 0, REQUESTS)
        hot = [fit_steps(side.ask("measure_steps", 1000 * run, REQUESTS)) for run in range(1, RUNS + 1)]
    for name, unit, goal, read in _ROWS:
        yield Result(
            name=f"scheduler, {name}",
            value=statistics.median(map(read, real)),
            limit=statistics.median(map(read, hot)),
            unit=unit,
            spread=spread_of([read(fit) for fit in real]),
            goal=None if goal is None else Goal(Measure.VALUE, Bound.AT_MOST, goal),
            params={"requests": REQUESTS, "block_tokens": BLOCK_TOKENS, "runs": RUNS},
        )


def make_arrivals(seed: int, requests: int) -> Iterator[list[list[int]]]:
    """Prompts that arrive before each step, until all have."""
    chance = random.Random(seed)
    made = 0
    while made < requests:
        now = min(chance.randint(0, MAX_ARRIVALS), requests - made)
        yield [make_prompt(seed + made + number, chance.randint(SHORTEST, LONGEST)) for number in range(now)]
        made += now


class StepCount:
    """Blocks that become full in a step, from the scheduler's own word."""

    def __init__(self) -> None:
        self.blocks = 0
        self.is_decode = False

    def note(self, output: Any) -> None:
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        self.blocks = sum(count_full(computed[name], tokens) for name, tokens in scheduled.items())
        self.is_decode = set(scheduled.values()) == {1}


def count_full(computed: int, tokens: int) -> int:
    return (computed + tokens) // BLOCK_TOKENS - computed // BLOCK_TOKENS


def measure_engine_steps(engine: Engine, clock: HookClock, *, seed: int, requests: int) -> list[Sample]:
    """Measures, in the engine's process, requests that all arrive in the first steps, run together and end."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    scheduler: Any = engine.core.scheduler
    connector = scheduler.connector
    count, plan = StepCount(), connector.build_connector_meta

    def plan_counted(output: Any) -> Any:
        count.note(output)
        return plan(output)

    connector.build_connector_meta = plan_counted
    samples: list[Sample] = []
    arrivals, number = make_arrivals(seed, requests), 0
    try:
        while (now := next(arrivals, None)) is not None or engine.llm.llm_engine.has_unfinished_requests():
            begun_s, running = clock.scheduler_s, number
            for prompt in now or ():
                number += 1
                engine.llm.llm_engine.add_request(f"{seed}-{number}", {"prompt_token_ids": prompt}, sampling)
            if not engine.llm.llm_engine.has_unfinished_requests():
                continue
            ended = any(output.finished for output in engine.llm.llm_engine.step())
            is_decode = count.is_decode and running == number and not ended
            samples.append((count.blocks, number - running, clock.scheduler_s - begun_s, int(is_decode)))
    finally:
        del connector.build_connector_meta
    engine.reset_local()
    return samples
