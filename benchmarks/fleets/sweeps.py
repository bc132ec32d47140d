"""The runs behind docs/fleet.md: questions, and the fleets that answer each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from benchmarks.fleets.costs import Costs
from benchmarks.fleets.fleet import FleetRun
from benchmarks.fleets.settings import Fleet, Kind, Routing, Tally
from benchmarks.fleets.workload import Workload

NODES = (2, 4, 8, 16, 32, 64)
MIDDLE = 16
MEMORY_SHARE, ENGINE_SHARE = 0.10, 0.02
"""Of the trace's distinct blocks, all nodes together."""
TFLOPS = (50, 100, 200, 400, 800)
RUNS = (1, 2, 4, 8, 16, 0)
SPLIT = 4
FAILS, JOINS = (0.43, 5), (0.7, 5)
"""When in the run, and which node."""
WINDOW_REQUESTS = 500

Row = dict[str, object]

_NONE = {"kind": Kind.NONE}
_PREFIX = {"kind": Kind.NONE, "routing": Routing.PREFIX}
_STORE = {"kind": Kind.STORE}
_HOMES = {"kind": Kind.HOMES, "home_share": 1.0, "home_policy": "lru"}
_PEERS = {"kind": Kind.PEERS}
_POOL = {"kind": Kind.POOL}
LINES: dict[str, dict[str, object]] = {
    "no remote": _NONE,
    "no remote, prefix routing": _PREFIX,
    "store, Valkey": _STORE | {"place": "valkey"},
    "store, Mooncake": _STORE | {"place": "mooncake"},
    "store, told of all uses": _STORE | {"place": "mooncake", "tells_uses": True},
    "homes": _HOMES | {"place": "peer-100g"},
    "all peers asked": _PEERS | {"place": "peer-100g"},
    "peers, prefix routing": _PEERS | {"place": "peer-100g", "routing": Routing.PREFIX},
    "one big pool": _POOL,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """`say` is told each row as it is there."""

    work: Workload
    costs: Costs
    say: Callable[[Row], None]

    def fleet(self, nodes: int, *, total: float = MEMORY_SHARE, **settings: object) -> Fleet:
        """Returns a fleet whose nodes together hold that share of the distinct blocks; a store holds as much again."""
        distinct = self.work.trace.block_count
        whole = Fleet(
            nodes=nodes,
            memory_blocks=int(distinct * total) // nodes,
            engine_blocks=int(distinct * total * ENGINE_SHARE / MEMORY_SHARE) // nodes,
            store_blocks=int(distinct * total),
        )
        return replace(whole, **settings)  # type: ignore[arg-type]

    def measure(self, question: str, line: str, fleet: Fleet, **more: object) -> tuple[Row, Tally]:
        run = FleetRun(self.work, fleet, self.costs)
        tally = run.run()
        row = {"question": question, "line": line} | _describe(fleet) | more | _summarize(tally)
        self.say(row)
        return row, tally

    def with_flops(self, flops_per_s: float) -> Bench:
        costs = replace(self.costs, model=replace(self.costs.model, flops_per_s=flops_per_s))
        return Bench(work=self.work, costs=costs, say=self.say)


def ask_nodes(bench: Bench) -> Iterator[Row]:
    """One pool's memory, cut into more and more nodes."""
    for nodes in NODES:
        for line, settings in LINES.items():
            yield bench.measure("nodes", line, bench.fleet(nodes, **settings))[0]


def ask_growth(bench: Bench) -> Iterator[Row]:
    """Measures fleets whose memory grows with the number of nodes."""
    for nodes in NODES:
        for line in ("no remote", "no remote, prefix routing", "homes", "all peers asked", "one big pool"):
            total = MEMORY_SHARE * nodes / MIDDLE
            yield bench.measure("growth", line, bench.fleet(nodes, total=total, **LINES[line]))[0]


def ask_places(bench: Bench) -> Iterator[Row]:
    """Every remote of the costs' file, and every routing."""
    for routing in Routing:
        shared = {"routing": routing}
        yield bench.measure("places", "no remote", bench.fleet(MIDDLE, **(_NONE | shared)))[0]
        for place in bench.costs.places:
            kinds = {"homes": _HOMES, "all peers asked": _PEERS} if place.startswith("peer") else {"store": _STORE}
            for line, settings in kinds.items():
                yield bench.measure("places", line, bench.fleet(MIDDLE, **(settings | shared | {"place": place})))[0]
        yield bench.measure("places", "one big pool", bench.fleet(MIDDLE, **(_POOL | shared)))[0]


def ask_speeds(bench: Bench) -> Iterator[Row]:
    """How fast must a remote be for how fast an engine?"""
    for tflops in TFLOPS:
        slower = bench.with_flops(tflops * 1e12)
        for line, settings in {
            "no remote": _NONE,
            "Valkey": _STORE | {"place": "valkey"},
            "8 Valkeys": _STORE | {"place": "valkey-x8"},
            "S3": _STORE | {"place": "s3"},
            "homes, 25 Gbit/s": _HOMES | {"place": "peer"},
            "homes, 100 Gbit/s": _HOMES | {"place": "peer-100g"},
            "Mooncake": _STORE | {"place": "mooncake"},
            "one big pool": _POOL,
        }.items():
            yield slower.measure("speeds", line, slower.fleet(MIDDLE, **settings), tflops=tflops)[0]


def ask_homes(bench: Bench, split: Bench) -> Iterator[Row]:
    """How many consecutive blocks have one home? `split`: the same trace in smaller blocks."""
    place = {"place": "peer-100g"}
    for run_blocks in RUNS:
        for policy in ("lru", "prefix"):
            settings = _HOMES | place | {"home_policy": policy, "run_blocks": run_blocks}
            yield bench.measure("homes", "set aside", bench.fleet(MIDDLE, **settings))[0]
    for run_blocks in (2, 4, 8):
        settings = _HOMES | place | {"run_blocks": run_blocks, "cuts_by_hash": True}
        yield bench.measure("homes", "set aside, cut by hash", bench.fleet(MIDDLE, **settings))[0]
    for line, more in {
        "set aside, told of all uses": {"tells_uses": True},
        "half set aside": {"home_share": 0.5},
        "among its own": {"home_share": None},
        "among its own, told": {"home_share": None, "tells_uses": True},
    }.items():
        yield bench.measure("homes", line, bench.fleet(MIDDLE, **(_HOMES | place | more)))[0]
    yield bench.measure("homes", "one big pool", bench.fleet(MIDDLE, **_POOL))[0]
    for run_blocks in (1, 16):
        settings = _HOMES | place | {"run_blocks": run_blocks}
        yield split.measure("homes", "set aside", split.fleet(MIDDLE, **settings), tokens_a_block=512 // SPLIT)[0]


def ask_failures(bench: Bench) -> Iterator[Row]:
    """A node fails, and comes back with nothing."""
    for line in ("no remote, prefix routing", "store, told of all uses", "homes", "all peers asked"):
        for event, fails, joins in (("none", (), ()), ("fails", (FAILS,), ()), ("fails, joins", (FAILS,), (JOINS,))):
            fleet = bench.fleet(MIDDLE, **(LINES[line] | {"fails": fails, "joins": joins}))
            row, tally = bench.measure("failures", line, fleet, event=event)
            times_s = bench.work.times_s
            at = [int(np.searchsorted(times_s, share * times_s[-1])) for share, _ in (FAILS, JOINS)]
            yield row | {"hit_rates": list_windows(tally, bench.work), "event_requests": at}


def list_windows(tally: Tally, work: Workload) -> list[float]:
    """Hit rates of so many requests after another, in the order of their arrival; without fewer at the end."""
    whole = len(work.blocks) // WINDOW_REQUESTS * WINDOW_REQUESTS
    lengths = np.array([len(blocks) for blocks in work.blocks])[:whole]
    hits = (tally.engine_hits + tally.memory_hits + tally.remote_hits)[:whole]
    sums = hits.reshape(-1, WINDOW_REQUESTS).sum(axis=1) / lengths.reshape(-1, WINDOW_REQUESTS).sum(axis=1)
    return [round(float(rate), 4) for rate in sums]


def _describe(fleet: Fleet) -> Row:
    """Returns the fields that differ from their defaults."""
    told: Row = {}
    for field in dataclasses.fields(fleet):
        value = getattr(fleet, field.name)
        told[field.name] = value.value if isinstance(value, Enum) else value
    return told


def _summarize(tally: Tally) -> Row:
    served = np.array(tally.served_bytes)
    held = np.array(tally.held_blocks)
    answers = {
        "hit_rate": tally.hit_rate,
        "engine_hit_rate": float(tally.engine_hits.sum()) / tally.references,
        "memory_hit_rate": float(tally.memory_hits.sum()) / tally.references,
        "remote_hit_rate": float(tally.remote_hits.sum()) / tally.references,
        "ttft_mean_s": float(tally.ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(tally.ttft_s, 50)),
        "ttft_p90_s": float(np.percentile(tally.ttft_s, 90)),
        "ttft_p99_s": float(np.percentile(tally.ttft_s, 99)),
        "busiest_served": float(served.max() / served.mean()) if served.any() else 0.0,
        "fullest_held": float(held.max() / held.mean()) if held.any() else 0.0,
        "computing_s": tally.prefill_s,
        "duration_s": tally.duration_s,
    }
    counts = ("read_bytes", "written_bytes", "questions", "batches", "too_slow_blocks", "dropped_blocks", "lost_blocks")
    return {name: round(value, 4) for name, value in answers.items()} | {
        name: getattr(tally, name) for name in (*counts, "rerouted", "completed", "references")
    }
