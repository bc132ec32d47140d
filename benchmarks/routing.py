"""What does a router that asks where a prompt is bring over two pools?

Replays a trace over two engines, each with a cache server's memory of its own, in the simulation of docs/fleet.md. The
router is that of examples/07_router: its own function chooses, by what /v1/prefix would answer (of the memories, not of
the engines' own caches) and by what each engine was given. Beside it are round robin, and the limit: one pool of both
memories. Prints a table, or one JSON line for each run; it needs no GPU and no server.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/07_router"))

from choice import choose  # noqa: E402

from benchmarks.fleets.costs import Costs, read_costs  # noqa: E402
from benchmarks.fleets.fleet import FleetRun  # noqa: E402
from benchmarks.fleets.node import Node, Request  # noqa: E402
from benchmarks.fleets.settings import Fleet, Kind, Routing, Tally  # noqa: E402
from benchmarks.fleets.sweeps import ENGINE_SHARE, MEMORY_SHARE  # noqa: E402
from benchmarks.fleets.workload import Workload, make_workload  # noqa: E402
from docs.table import render_table  # noqa: E402
from kvoffload.cache.trace import read_trace  # noqa: E402

NODES = 2
SHARES = (0.05, 0.10, 0.20)
"""Of the trace's distinct blocks, all memories together."""
ASKS = "the router of examples/07_router"
HITS_ALONE = "most hits, then least load"
LINES = ("round robin", "least loaded", HITS_ALONE, ASKS, "one pool, round robin")


class AskingRun(FleetRun):
    """A router asks all memories, and chooses as the example does."""

    def __init__(self, work: Workload, fleet: Fleet, costs: Costs) -> None:
        super().__init__(work, fleet, costs)
        self._given: dict[int, int] = {}
        """Tokens that a request's engine was expected to compute for it."""

    def _choose(self, now_s: float, request: Request) -> Node:
        up = [node for node in self.nodes if node.is_up]
        hits = [node.memory.count_prefix(request.blocks) * self._work.block_tokens for node in up]
        waiting = [sum(self._given[number] for number in node.requests) for node in up]
        turn, self._turn = self._turn, self._turn + 1
        chosen = self._decide(hits, waiting, request.tokens, turn)
        self._given[request.number] = request.tokens - hits[chosen]
        return up[chosen]

    def _decide(self, hits: Sequence[int], waiting: Sequence[int], tokens: int, turn: int) -> int:
        return choose(hits, waiting, tokens=tokens, turn=turn)


class HitsAloneRun(AskingRun):
    """Load decides only between engines that have as much of a prompt."""

    def _decide(self, hits: Sequence[int], waiting: Sequence[int], tokens: int, turn: int) -> int:
        return min(range(len(hits)), key=lambda at: (-hits[at], waiting[at], (at - turn) % len(hits)))


def run(work: Workload, costs: Costs, line: str, *, share: float, nodes: int = NODES) -> dict[str, Any]:
    distinct = work.trace.block_count
    fleet = Fleet(
        nodes=nodes,
        memory_blocks=int(distinct * share) // nodes,
        engine_blocks=int(distinct * share * ENGINE_SHARE / MEMORY_SHARE) // nodes,
        kind=Kind.POOL if line.startswith("one pool") else Kind.NONE,
        routing=Routing.LEAST_LOADED if line == "least loaded" else Routing.ROUND_ROBIN,
    )
    kind = {ASKS: AskingRun, HITS_ALONE: HitsAloneRun}.get(line, FleetRun)
    tally = kind(work, fleet, costs).run()
    return {"line": line, "nodes": nodes, "memory_share": share} | _summarize(tally)


def _summarize(tally: Tally) -> dict[str, Any]:
    return {
        "hit_rate": round(tally.hit_rate, 4),
        "memory_hit_rate": round(float(tally.memory_hits.sum()) / tally.references, 4),
        "ttft_mean_s": round(float(tally.ttft_s.mean()), 3),
        "computing_s": round(tally.prefill_s, 1),
        "completed": tally.completed,
    }


def run_all(work: Workload, costs: Costs) -> Iterator[dict[str, Any]]:
    for share in SHARES:
        for line in LINES:
            yield run(work, costs, line, share=share)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Hits in per cent of all full blocks, and the mean time to first token; a column for each size of the memories."""
    cells = {
        (row["line"], row["memory_share"]): f"{100 * row['hit_rate']:.1f}%, {row['ttft_mean_s']:.2f} s" for row in rows
    }
    columns = ["memory, of all distinct blocks", *(f"{share:.0%}" for share in SHARES)]
    return "\n".join(render_table(columns, [[line, *(cells[line, share] for share in SHARES)] for line in LINES]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="as `kvoffload replay` reads it")
    parser.add_argument("--costs", type=Path, default=ROOT / "benchmarks/fleet_costs.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    rows = []
    for row in run_all(make_workload(list(read_trace(options.trace))), read_costs(options.costs)):
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    if not options.json:
        print(draw(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
