"""The connector on a real vLLM engine: time to first token, overhead, scheduler time a step, and what is kept.

It needs vllm, transformers and an installed kvoffload; no download, and a GPU for `real_size` alone. Engines run one
after the other.
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

from benchmarks.connectors.kept import measure_kept
from benchmarks.connectors.overhead import measure_overhead
from benchmarks.connectors.real_size import measure_real_size
from benchmarks.connectors.steps import measure_scheduler
from benchmarks.connectors.ttft import measure_ttft
from benchmarks.ending import end_in_order
from kvoffload.bench.base import Result
from kvoffload.cli.bench import make_table

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    "ttft": measure_ttft,
    "overhead": measure_overhead,
    "scheduler": measure_scheduler,
    "kept": measure_kept,
}
ALL_ROWS = {**ROWS, "real_size": measure_real_size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="some of them, with commas between; real_size needs a GPU"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := sorted(set(chosen) - set(ALL_ROWS)):
        parser.error(f"no row is called {', '.join(unknown)}; known are {', '.join(ALL_ROWS)}")
    signal.signal(signal.SIGTERM, end_in_order)
    # For the processes that run engines; LMCache would report its use.
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in chosen:
            for result in ALL_ROWS[row](Path(folder), _say):
                results.append(result)
                if options.json:
                    print(json.dumps(result.as_json()), flush=True)
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 200).print(make_table(results))
    return 0


def _say(step: str) -> None:
    print(f"vllm_connectors: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
