"""Single parts of kvoffload next to this machine's limits: `python -m benchmarks.parts NAME`, without a name all."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from benchmarks.parts.arena import ArenaBenchmark
from benchmarks.parts.block_hash import BlockHashBenchmark
from benchmarks.parts.index import IndexBenchmark
from benchmarks.parts.outage import OutageBenchmark
from benchmarks.parts.page_map import PageMapBenchmark
from benchmarks.parts.tiered import TieredBenchmark
from benchmarks.parts.web import WebBenchmark
from kvoffload.bench.base import Benchmark, Result
from kvoffload.cli.bench import make_table, measure

BENCHMARKS: tuple[Benchmark, ...] = (
    ArenaBenchmark(),
    BlockHashBenchmark(),
    IndexBenchmark(),
    OutageBenchmark(),
    PageMapBenchmark(),
    TieredBenchmark(),
    WebBenchmark(),
)


def main() -> int:
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; known are {', '.join(known)}")
    results: list[Result] = []
    for result in measure([known[name] for name in options.names or known], is_each_wanted=bool(options.names)):
        results.append(result)
        if options.json:
            print(json.dumps(result.as_json()), flush=True)
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 160).print(make_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
