"""Llama-3.1-8B's size on real vLLM and a GPU: first tokens of restored prompts, and batches that reuse nothing.

Its weights are random numbers that vLLM makes itself; cache and work are as large as the real model's. Graphs are
captured as vLLM does by default, without torch.compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.connectors.engine_child import kvoffload, run_engine
from benchmarks.connectors.model import LLAMA_8B, LLAMA_8B_TOKEN_BYTES
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.measure import spread_of, summarize_pairs
from kvoffload.units import GIB

PROMPTS = (1024, 8192, 32_768)
ROUNDS = 5
COLD_ROUNDS = 2
REQUESTS, TOKENS, NEW_TOKENS = 128, 1024, 128
BATCHES = 3
FIRST_SEED = 100_000
"""Batches begin at multiples of it, so that none has a seed of a single prompt."""
ENGINE = {
    "kv_cache_memory_bytes": 48 * GIB,
    "max_model_len": max(PROMPTS) + 128,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
}
MEMORY = "48GiB"


def measure_real_size(folder: Path, progress: Progress) -> Iterator[Result]:
    """The limit of a restored prompt is the engine's own hit and one pinned copy of as many bytes."""
    progress("8B with kvoffload")
    with run_engine(folder, LLAMA_8B.name, kvoffload(memory=MEMORY), **ENGINE) as engine:
        copied_s = engine.ask("copy_pinned", GIB)
        for tokens in PROMPTS:
            yield _measure_first_token(engine, tokens, copied_s / GIB)
        runner = engine.ask("runner")
        with_it = _serve(engine)
    progress("8B without a connector")
    with run_engine(folder, LLAMA_8B.name, None, **ENGINE) as engine:
        without = _serve(engine)
    yield Result(
        name="batch, 8B",
        value=statistics.median(one["wall_s"] for one in with_it),
        limit=statistics.median(one["wall_s"] for one in without),
        unit="s",
        spread=spread_of([one["wall_s"] for one in with_it]),
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.01),
        params={
            "requests": REQUESTS,
            "prompt": TOKENS,
            "new": NEW_TOKENS,
            "runner": runner,
            "reused": int(sum(one["cached"] for one in with_it)),
            "kept_mib": int(with_it[-1]["kept"]) >> 20,
            "saw_mib": BATCHES * REQUESTS * (TOKENS + NEW_TOKENS) * LLAMA_8B_TOKEN_BYTES >> 20,
        },
    )


def _measure_first_token(engine: Child, tokens: int, byte_s: float) -> Result:
    cold, own, restored, cached, same = [], [], [], [], True
    for number in range(1 + COLD_ROUNDS):  # the first one warms up
        engine.ask("reset")
        cold.append(engine.ask("generate", tokens + number, tokens, 1)["seconds"])
    for number in range(1 + ROUNDS):
        hit = engine.ask("generate", tokens + COLD_ROUNDS, tokens, 1)
        engine.ask("reset")
        back = engine.ask("generate", tokens + COLD_ROUNDS, tokens, 1)
        same &= hit["answer"] == back["answer"]
        if number:
            own.append(hit["seconds"] + back["cached"] * LLAMA_8B_TOKEN_BYTES * byte_s)
            restored.append(back["seconds"])
            cached.append(back["cached"])
    pair = summarize_pairs(restored, own)
    return Result(
        name="ttft, 8B",
        value=pair.value_s * 1e3,
        limit=pair.limit_s * 1e3,
        unit="ms",
        spread=pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.1),
        params={
            "prompt": tokens,
            "restored": min(cached),
            "same_answer": "yes" if same else "no",
            "copied_ms": round(min(cached) * LLAMA_8B_TOKEN_BYTES * byte_s * 1e3, 1),
            "cold_ms": round(statistics.median(cold[1:]) * 1e3, 1),
        },
    )


def _serve(engine: Child) -> list[dict[str, float]]:
    engine.ask("serve_batch", 0, 8, TOKENS, NEW_TOKENS)  # warms up
    return [
        engine.ask("serve_batch", FIRST_SEED * number, REQUESTS, TOKENS, NEW_TOKENS) for number in range(1, 1 + BATCHES)
    ]
