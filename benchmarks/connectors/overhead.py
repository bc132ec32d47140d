"""What does the connector cost an engine that reuses nothing?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.connectors.engine_child import kvoffload, run_engine
from benchmarks.connectors.model import DENSE_86M
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.measure import spread_of
from kvoffload.units import GIB

REQUESTS, TOKENS, NEW_TOKENS = 64, 600, 16
ROUNDS = 2
MEMORY_BYTES = 2 * GIB
ENGINE = {
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": REQUESTS,
}


def measure_overhead(folder: Path, progress: Progress) -> Iterator[Result]:
    """The server's start apart; then batches with the connector, then without."""
    progress("a batch with kvoffload")
    with run_engine(folder, DENSE_86M.name, kvoffload(memory="2GiB"), **ENGINE) as engine:
        start = engine.ask("server_start", MEMORY_BYTES)
        with_it = _serve(engine)
    yield Result(
        name="start-up",
        value=start["server"],
        limit=start["written"],
        unit="s",
        spread=0.0,
        goal=None,
        params={"memory_mib": MEMORY_BYTES >> 20},
    )
    progress("a batch without a connector")
    with run_engine(folder, DENSE_86M.name, None, **ENGINE) as engine:
        without = _serve(engine)
    params = {"requests": REQUESTS, "prompt": TOKENS, "new": NEW_TOKENS, "reused": int(_sum(with_it, "cached"))}
    parts = ("threads", "scheduler_hooks", "worker_hooks", "server")
    yield Result(
        name="overhead",
        value=_median(with_it, "ours"),
        limit=_median(with_it, "engine"),
        unit="CPU s",
        spread=spread_of([one["ours"] / one["engine"] for one in with_it]),
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 0.01),
        params={
            **params,
            "kept_mib": int(with_it[-1]["kept"]) >> 20,
            **{f"{part}_ms": round(_median(with_it, part) * 1e3, 1) for part in parts},
        },
    )
    for name, unit in (("wall_s", "s"), ("engine", "CPU s")):
        yield Result(
            name=f"batch, {'wall' if name == 'wall_s' else 'CPU of the process'}",
            value=_median(with_it, name),
            limit=_median(without, name),
            unit=unit,
            spread=spread_of([one[name] for one in with_it]),
            goal=None,
            params=params,
        )


def _serve(engine: Any) -> list[dict[str, float]]:
    engine.ask("serve_batch", 0, 4, TOKENS, NEW_TOKENS)  # warms up
    return [engine.ask("serve_batch", 1000 * number, REQUESTS, TOKENS, NEW_TOKENS) for number in range(1, ROUNDS + 1)]


def _median(batches: list[dict[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in batches)


def _sum(batches: list[dict[str, float]], name: str) -> float:
    return sum(one[name] for one in batches)
