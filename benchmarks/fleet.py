"""A fleet of cache servers, simulated: a published trace over 2 to 64 nodes, with the costs of fleet_costs.toml.

It writes a file of results, the pictures of docs/fleet.md, and prints its tables. It needs no GPU and no server; the
trace is Mooncake's conversation trace, or any of its form (`kvoffload replay` says which).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.fleets.costs import read_costs
from benchmarks.fleets.pictures import draw_all
from benchmarks.fleets.sweeps import (
    SPLIT,
    Bench,
    Row,
    ask_failures,
    ask_growth,
    ask_homes,
    ask_nodes,
    ask_places,
    ask_speeds,
)
from benchmarks.fleets.tables import make_tables
from benchmarks.fleets.workload import make_workload
from kvoffload.cache.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="left out: nothing is run, what lies in --results is shown")
    parser.add_argument("--costs", type=Path, default=ROOT / "benchmarks/fleet_costs.toml")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/fleet.json")
    parser.add_argument("--date", default="", help="goes into the results")
    parser.add_argument("--pictures", type=Path, help="a folder; left out: none are drawn")
    options = parser.parse_args()
    if options.trace:
        costs = read_costs(options.costs)
        requests = list(read_trace(options.trace))
        bench = Bench(work=make_workload(requests), costs=costs, say=_say)
        split = Bench(work=make_workload(requests, split=SPLIT), costs=costs, say=_say)
        rows: list[Row] = []
        for ask in (ask_nodes, ask_growth, ask_places, ask_speeds, ask_failures):
            rows += ask(bench)
        rows += ask_homes(bench, split)
        head = {"name": "fleet", "date": options.date, "trace": options.trace.name, "sources": costs.sources}
        options.results.parent.mkdir(exist_ok=True)
        options.results.write_text("\n".join(json.dumps(row) for row in [head, *rows]) + "\n")
    _, *rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    for name, table in make_tables(rows).items():
        print(f"{name}\n\n{table}")
    if options.pictures:
        draw_all(rows, options.pictures)
    return 0


def _say(row: Row) -> None:
    told = {name: row[name] for name in ("question", "line", "nodes", "routing", "place", "hit_rate", "ttft_mean_s")}
    print(f"fleet: {json.dumps(told)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
