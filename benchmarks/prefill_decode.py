"""How long after an engine has computed a prompt does another one, which restores it, say its first token?

The limit is what cannot be saved: the prompt's bytes are copied out of the one engine and into the other, each by one
thread here, and the second engine computes what its own hit of the same prompt would compute. It needs vllm,
transformers and an installed kvoffload, no download and no GPU.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.connectors.engine_child import KVOFFLOAD, make_prompt
from benchmarks.connectors.model import BLOCK_TOKENS, DENSE_86M, TOKEN_BYTES
from kvoffload.bench.base import Result
from kvoffload.bench.measure import summarize_pairs
from kvoffload.cli.bench import make_table
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, prepare_environment, start_engine

PROMPTS = (1088, 4160)
"""Each ends within a block, which the second engine computes."""
ROUNDS = 10
COLD_ROUNDS = 3
ENGINE = {
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": max(PROMPTS) + 128,
    "max_num_batched_tokens": max(PROMPTS) + 128,
}


def measure(folder: Path) -> Iterator[Result]:
    DENSE_86M.build(folder / DENSE_86M.name)
    with ExitStack() as stack:
        server = stack.enter_context(SharedServer(folder, memory="2GiB"))
        server.start()
        engines = []
        for role in ("kv_producer", "kv_consumer"):
            connector = {
                "kv_connector": KVOFFLOAD,
                "kv_role": role,
                "kv_connector_extra_config": {"server": str(server.socket), "arrival_deadline": "60s"},
            }
            model = folder / DENSE_86M.name
            engine = start_engine(DENSE_86M, model, has_own_processes=True, kv_transfer_config=connector, **ENGINE)
            engines.append(stack.enter_context(closing(engine)))
        for tokens in PROMPTS:
            yield _measure(engines[0], engines[1], tokens)


def _measure(producer: Engine, consumer: Engine, tokens: int) -> Result:
    restorable = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    first, limits, own, copies, cached = [], [], [], [], []
    cold = [_ask(consumer, make_prompt(-number - tokens, tokens))[0] for number in range(1 + COLD_ROUNDS)]
    for number in range(1 + ROUNDS):  # the first one warms up
        prompt = make_prompt(tokens + number, tokens)
        told = producer.generate(prompt, max_tokens=1).kv_transfer_params or {}
        first_s, hit = _ask(consumer, prompt, **told)
        own_s, _ = _ask(consumer, prompt)
        copy_s = _copy_twice(restorable * TOKEN_BYTES)
        if number:
            first.append(first_s)
            own.append(own_s)
            copies.append(copy_s)
            limits.append(own_s + copy_s)
            cached.append(hit)
    pair = summarize_pairs(first, limits)
    return Result(
        name="first token after a prefill elsewhere",
        value=pair.value_s * 1e3,
        limit=pair.limit_s * 1e3,
        unit="ms",
        spread=pair.spread,
        goal=None,
        params={
            "prompt": tokens,
            "restored": min(cached),
            "restorable": restorable,
            "copies_ms": round(statistics.median(copies) * 1e3, 1),
            "own_hit_ms": round(statistics.median(own) * 1e3, 1),
            "cold_ms": round(statistics.median(cold[1:]) * 1e3),
        },
    )


def _ask(engine: Engine, prompt: list[int], **wishes: int) -> tuple[float, int]:
    """Seconds until the first token, and prompt tokens that were not computed."""
    begun_s = time.perf_counter()
    output = engine.generate(prompt, max_tokens=1, **wishes)
    return time.perf_counter() - begun_s, output.num_cached_tokens or 0


def _copy_twice(size_bytes: int) -> float:
    """Seconds for so many bytes into shared memory and out of it again; neither place is touched first by that."""
    with mmap.mmap(-1, size_bytes) as memory:
        shared = np.frombuffer(memory, np.uint8)
        shared.fill(1)
        source, target = np.full(size_bytes, 2, np.uint8), np.full(size_bytes, 3, np.uint8)
        begun_s = time.perf_counter()
        np.copyto(shared, source)
        np.copyto(target, shared)
        seconds = time.perf_counter() - begun_s
        del shared
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    prepare_environment(VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_FLASHINFER_SAMPLER="0")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in measure(Path(folder)):
            results.append(result)
            if options.json:
                print(json.dumps(result.as_json()), flush=True)
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 200).print(make_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
