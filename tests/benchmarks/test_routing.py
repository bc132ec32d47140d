"""Rules that a router that asks must keep, on a made-up trace of conversations that grow."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.fleets.costs import Costs, read_costs
from benchmarks.fleets.workload import Workload, make_workload
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest

ROOT = Path(__file__).parents[2]


@cache
def work() -> Workload:
    """Returns prompts that all begin with one system prompt."""
    rng = random.Random(3)
    talks: list[list[int]] = [[0] for _ in range(12)]
    fresh = iter(range(1, 100_000))
    requests = []
    for at in range(400):
        talk = talks[rng.randrange(len(talks))]
        talk += [next(fresh) for _ in range(2)]
        if len(talk) > 20:
            talk[:] = [0, next(fresh)]
        tokens = len(talk) * BLOCK_TOKENS
        requests.append(TraceRequest(timestamp_ms=at * 1000, input_length=tokens, output_length=1, hash_ids=list(talk)))
    return make_workload(requests)


@cache
def costs() -> Costs:
    return read_costs(ROOT / "benchmarks/fleet_costs.toml")


@cache
def hit_rate(line: str) -> float:
    row = routing.run(work(), costs(), line, share=0.2)
    assert row["completed"] == len(work().blocks)
    return float(row["hit_rate"])


def test_who_asks_hits_more_than_who_does_not_and_less_than_one_pool() -> None:
    assert hit_rate("round robin") < hit_rate(routing.ASKS) <= hit_rate("one pool, round robin")


def test_the_examples_own_function_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def first(hits: list[int], waiting: list[int], *, tokens: int, turn: int) -> int:
        seen.append((len(hits), len(waiting), turn))
        return 0

    original = routing.choose.__code__.co_filename
    assert Path(original) == ROOT / "examples/07_router/choice.py"
    monkeypatch.setattr(routing, "choose", first)
    routing.run(work(), costs(), routing.ASKS, share=0.2)
    assert seen == [(2, 2, turn) for turn in range(len(work().blocks))]


def test_runs_are_drawn_as_a_table() -> None:
    rows = [
        {"line": line, "memory_share": share, "hit_rate": 0.256, "ttft_mean_s": 1.295}
        for line in routing.LINES
        for share in routing.SHARES
    ]
    lines = routing.draw(rows).splitlines()
    assert lines[0] == "| memory, of all distinct blocks | 5% | 10% | 20% |"
    assert lines[2] == "| round robin | 25.6%, 1.29 s | 25.6%, 1.29 s | 25.6%, 1.29 s |"
    assert len(lines) == 2 + len(routing.LINES)
