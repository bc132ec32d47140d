"""The scenario of other connectors: the same requests, bytes of a pool and link, one connector after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.ground.engine import Run, VirtualEngine
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.figures import count_hits, find_percentile, serve_parts
from benchmarks.ground.models import Model
from benchmarks.ground.pool_sweep import SEGMENT_BYTES, SweepWork, prepare_sweep
from benchmarks.ground.trial import open_offloading, open_ours
from benchmarks.ground.work import count_tokens
from kvoffload.bench.base import Bound, Goal, Measure, Result
from kvoffload.units import MIB

if TYPE_CHECKING:
    from benchmarks.ground.scenarios import Ground

OURS = "kvoffload"
Params = dict[str, int | float | str]
Opener = Callable[..., AbstractContextManager[VirtualEngine]]
OTHERS: Mapping[str, Opener] = {
    f"vLLM {policy} {blocks}x": partial(
        open_offloading, settings={"eviction_policy": policy, "blocks_per_chunk": blocks}
    )
    for policy in ("lru", "arc")
    for blocks in (1, 16)
}
"""vLLM's own by the policy of its CPU tier, and by how many of the engine's blocks one of the tier's has."""


def compare_others(model: Model, ground: Ground) -> Iterator[Result]:
    """The sweep's conversations and pools with vLLM's own OffloadingConnector and ours; without pools its refusals."""
    opened: dict[str, Opener] = {OURS: partial(open_ours, segment_bytes=SEGMENT_BYTES)}
    for name, open_engine in OTHERS.items():
        fault = find_refusal(open_engine, model)
        if fault is None:
            opened[name] = open_engine
        else:
            yield _row(0, 0, {**_name(model, name), "refused": fault})
    if not ground.pools:
        return
    work = prepare_sweep(model, ground)
    for percent in ground.pools:
        pool_bytes = work.size_pool(percent)
        ours = 0
        for name, open_engine in opened.items():
            with open_engine(model, EngineSettings(), pool_bytes=pool_bytes) as engine:
                run = serve_parts(engine, work.parts)
                stored = count_stored(engine)
            ours = ours or count_hits(run)
            pool: Params = {"percent": percent, "pool_mib": pool_bytes // MIB, "all_mib": work.all_bytes // MIB}
            yield _row(count_hits(run), ours, {**_name(model, name), **pool, **_describe(run, work, stored)})


def find_refusal(open_engine: Opener, model: Model) -> str | None:
    """Returns what an engine says that does not start with a connector, in one line; None: it starts."""
    try:
        with open_engine(model, EngineSettings()):
            return None
    except (AssertionError, NotImplementedError, ValueError) as fault:
        return " ".join(f"{type(fault).__name__}: {fault}".split())


def count_stored(engine: VirtualEngine) -> int:
    """Returns the bytes that saves of all ranks have put into the pool."""
    copied = sum(copies.all_saved_bytes for copies in engine.machine.engines.values())
    sides = [getattr(rank.connector, "worker_side", None) for rank in engine.ranks]
    return copied - sum(side.compared_bytes for side in sides if side is not None)


def _describe(run: Run, work: SweepWork, stored: int) -> Params:
    times = [one.ttft_s * 1e3 for one in run.served]
    steps = [step for step in run.steps if step.tokens]
    hooks = [step.scheduler_ms for step in steps]
    return {
        "requests": len(run.served),
        "prompt_tokens": sum(count_tokens(part) for part in work.parts),
        "only_pool": count_hits(run) - work.alone,
        "first_token_p50_ms": round(find_percentile(times, 50), 1),
        "first_token_p99_ms": round(find_percentile(times, 99), 1),
        "output_per_s": round(run.output_tokens / run.seconds, 2),
        # Those of steps that compute nothing count, too.
        "scheduler_mean_ms": round(sum(step.scheduler_ms for step in run.steps) / len(steps), 3),
        "scheduler_p99_ms": round(find_percentile(hooks, 99), 3),
        "worker_mean_ms": round(statistics.fmean(step.worker_ms for step in steps), 3),
        "stored_per_byte": round(stored / work.all_bytes, 3),
    }


def _name(model: Model, connector: str) -> Params:
    return {"model": model.name, "scenario": "others", "connector": connector}


def _row(hits: int, ours: int, params: Params) -> Result:
    return Result(
        name="tokens hit with others",
        value=hits,
        limit=max(ours, 1),
        unit="tokens",
        spread=0.0,
        goal=None if params["connector"] == OURS else Goal(Measure.RATIO, Bound.AT_MOST, 1.0),
        params=params,
    )
