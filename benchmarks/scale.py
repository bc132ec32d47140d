"""Does the connector keep up at the sizes of real models? vLLM's scheduler in virtual time, on GPUs that are not there.

It needs vllm and an installed kvoffload; no GPU, no weights. Models run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

for _name in [name for name in os.environ if name.startswith("VLLM_")]:
    del os.environ[_name]
# Before vLLM is imported, which reads it then.
os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"

from benchmarks.ending import end_in_order  # noqa: E402
from benchmarks.ground.flagships import FLAGSHIPS  # noqa: E402
from benchmarks.ground.models import MODELS  # noqa: E402
from benchmarks.ground.pictures import draw_run  # noqa: E402
from benchmarks.ground.scenarios import Ground, measure_model  # noqa: E402
from benchmarks.ground.server_start import start_server  # noqa: E402
from benchmarks.ground.work import CONVERSATIONS_SEED  # noqa: E402
from kvoffload.bench.base import Result  # noqa: E402
from kvoffload.cli.bench import make_table  # noqa: E402

SHORT_MODELS = ("Llama-3.1-70B", "gpt-oss-120b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="some of them, with commas between")
    parser.add_argument("--scenarios", help="some of them, by their function's names, with commas between")
    parser.add_argument("--short", action="store_true", help="two models, in less than a minute")
    parser.add_argument(
        "--trace", type=Path, help="conversations, as `kvoffload replay` reads them; made up without it"
    )
    parser.add_argument("--seed", type=int, default=CONVERSATIONS_SEED, help="of the conversations that are made up")
    parser.add_argument("--pools", default="5,10,20,50", help="of a sweep, in percent of what is computed")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each model")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    known = {model.name: model for model in (*MODELS, *FLAGSHIPS)}
    chosen = options.models.split(",") if options.models else SHORT_MODELS if options.short else tuple(known)
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"no model is called {', '.join(unknown)}; known are {', '.join(known)}")
    signal.signal(signal.SIGTERM, end_in_order)
    results: list[Result] = []
    # Lines that vLLM prints must not stand between results.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        pools = [float(percent) for percent in options.pools.split(",") if percent]
        ground = Ground(Path(folder), options.trace, is_short=options.short, seed=options.seed, pools=pools)
        if options.scenarios:
            ground.scenarios = tuple(options.scenarios.split(","))

        def note(result: Result) -> None:
            results.append(result)
            if options.json:
                print(json.dumps(result.as_json()), file=lines, flush=True)

        if not options.short and (not ground.scenarios or start_server.__name__ in ground.scenarios):
            for result in start_server():
                note(result)
        for name in chosen:
            for result in measure_model(known[name], ground, _say):
                note(result)
            if options.pictures is not None and name in ground.runs:
                draw_run(name, ground.runs[name], options.pictures)
    if not options.json:
        Console(file=lines, width=None if lines.isatty() else 200).print(make_table(results))
    return 0


def _say(step: str) -> None:
    print(f"scale: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
