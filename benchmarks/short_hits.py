"""Measures what a load inside the step would bring to the first token of short hits.

Requests whose prompts begin with a few blocks that were saved come one by one to an engine on the proving ground that
is idle, or decodes for others. Their prefix is computed; loaded by our connector; and loaded by the ideal one, during
other steps as ours does it, and inside the step that computes the rest. It needs vLLM and
kvoffload, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.table import Table

for _name in [name for name in os.environ if name.startswith("VLLM_")]:
    del os.environ[_name]
# Before vLLM is imported, which reads it then.
os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})

from benchmarks.ground.accelerator import Share, StepCost  # noqa: E402
from benchmarks.ground.engine import VirtualEngine  # noqa: E402
from benchmarks.ground.engine_config import EngineSettings  # noqa: E402
from benchmarks.ground.models import MODELS, Model  # noqa: E402
from benchmarks.ground.trial import open_bare, open_ideal, open_ours  # noqa: E402
from benchmarks.ground.work import Ask, make_fresh, make_tokens  # noqa: E402

SIZES = (1, 2, 4, 8, 16, 32)
"""Hits have so many blocks."""
RUNNING = (0, 64, 256)
REST_TOKENS = 32
"""The number of tokens in each prompt that are computed after the hit."""
OTHERS_TOKENS = 512
PAUSE_S = 0.05
"""So much time lies between two hits, and a part of a step that changes from one to the next."""

Open = Callable[[Model, EngineSettings], AbstractContextManager[VirtualEngine]]
ARMS: Mapping[str, Open] = {
    "computed": open_bare,
    "loaded by ours": open_ours,
    "ideal, beside steps": open_ideal,
    "ideal, inside the step": partial(open_ideal, in_step=True),
}


def make_prefixes(block: int, *, each: int) -> list[Ask]:
    """Makes a prompt for each hit, which fills its blocks."""
    return [
        Ask(f"first-{size}-{number}", make_tokens(size * 1000 + number, size * block + 1), [1])
        for size in SIZES
        for number in range(each)
    ]


def make_hits(prefixes: Sequence[Ask], block: int, *, from_s: float) -> list[Ask]:
    """Makes one of each size in turn, so that none has a part of the time for itself."""
    each = len(prefixes) // len(SIZES)
    hits = []
    for number in range(each):
        for at, size in enumerate(SIZES):
            prefix = prefixes[at * each + number].prompt[: size * block]
            rest = make_tokens(900_000 + size * 1000 + number, REST_TOKENS)
            # No multiple of a step: they come at all times within one.
            arrival_s = from_s + len(hits) * PAUSE_S * 1.0137
            hits.append(Ask(f"hit-{size}-{number}", prefix + rest, [1, 1], arrival_s))
    return hits


def measure(model: Model, running: int, open_engine: Open, *, each: int) -> tuple[dict[int, float], dict[int, int]]:
    """Measures milliseconds to the first token in the mean, and counts hits, by the blocks that could be hit."""
    settings = EngineSettings(max_running=running + 8)
    with open_engine(model, settings) as engine:
        block = engine.config.block_size
        prefixes = make_prefixes(block, each=each)
        engine.serve(prefixes)
        assert engine.forget()
        cost = StepCost(model)
        # All others decode by then.
        from_s = 2 * running * OTHERS_TOKENS / cost.prefill_rate() + 0.2
        hits = make_hits(prefixes, block, from_s=from_s)
        step_s = cost.seconds([Share(1, OTHERS_TOKENS)] * running) or 1.0
        new_tokens = int(hits[-1].arrival_s / step_s) + 100
        others = make_fresh(running, tokens=OTHERS_TOKENS, new_tokens=new_tokens, per_s=0, seed=9)
        run = engine.serve([*others, *hits])
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    found = dict.fromkeys(SIZES, 0)
    for one in run.served:
        kind, _, rest = one.ask.name.partition("-")
        if kind == "hit":
            size = int(rest.partition("-")[0])
            times[size].append(one.ttft_s * 1e3)
            found[size] += one.external_tokens > 0
    return {size: fmean(of) for size, of in times.items()}, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-Next-80B", help="with commas between")
    parser.add_argument("--running", default="0,64,256", help="requests that decode beside them, with commas between")
    parser.add_argument("--each", type=int, default=8, help="requests of each size")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    known = {model.name: model for model in MODELS}
    for name in options.models.split(","):
        for running in map(int, options.running.split(",")):
            table = Table("first token, ms", *(f"{size} blocks" for size in SIZES), title=f"{name}, {running} running")
            for arm, open_engine in ARMS.items():
                times, hits = measure(known[name], running, open_engine, each=options.each)
                if options.json:
                    found = {"model": name, "running": running, "arm": arm, "ms": times, "hits": hits}
                    print(json.dumps(found), flush=True)
                table.add_row(arm, *(f"{times[size]:.2f} ({hits[size]})" for size in SIZES))
            if not options.json:
                Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
