"""Measures whether the server's eviction policy is ever second, and by how much.

Replays traces from seeds, and one that is named with its halves and its reverse, over each policy that `kvoffload
replay` knows. Prints hit rates in per cent, the prefill time that these hits save in per cent of all of it, and by how
much the server's policy is above or below the best of the others. Of the trace whose traffic becomes another one
half-way it also prints that for windows after the shift.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.evictions.after_shift import WINDOWS, AfterShift, compare_after_shift
from benchmarks.evictions.traces import GENERATED, Trace, describe
from kvoffload import native
from kvoffload.cache.benefit import PrefillCost, parse_prefill_cost
from kvoffload.cache.replay import OPTIMUM, pack_trace, replay
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest, read_trace

PERCENTS = (1, 2, 5, 10, 20)
COST = PrefillCost()
SHIFTED = "shift"
"""The traffic of the generated trace with this name becomes another one half-way."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One trace and one model: a row for each policy, a column for each capacity, all in per cent."""

    trace: str
    is_hybrid: bool
    rates: dict[str, list[float]]
    saved: dict[str, list[float]]
    """These are shares of the time that computing all full blocks takes."""

    @property
    def above_best(self) -> list[float]:
        """Points of the hit rate by which the server's policy is above the best of the others, at each capacity."""
        return _above_best(self.rates)

    @property
    def saved_above_best(self) -> list[float]:
        """Points of the saved time by which the server's policy is above the best of the others, at each capacity."""
        return _above_best(self.saved)


def _above_best(shares: Mapping[str, list[float]]) -> list[float]:
    others = [values for policy, values in shares.items() if policy not in (DEFAULT_POLICY, OPTIMUM)]
    return [value - max(best) for value, *best in zip(shares[DEFAULT_POLICY], *others, strict=True)]


def compare(
    name: str,
    requests: Trace,
    *,
    is_hybrid: bool = False,
    percents: Sequence[float] = PERCENTS,
    cost: PrefillCost = COST,
) -> Comparison:
    """All policies and, without a hybrid model, the optimum."""
    packed = _pack(requests)
    rates: dict[str, list[float]] = {}
    saved: dict[str, list[float]] = {}
    for result in replay(
        packed, policies=native.policy_names(), capacity_percents=tuple(percents), is_hybrid=is_hybrid
    ):
        rates.setdefault(result.policy, []).append(100 * result.hit_rate)
        saved.setdefault(result.policy, []).append(100 * result.saved_share(cost, BLOCK_TOKENS))
    return Comparison(trace=name, is_hybrid=is_hybrid, rates=rates, saved=saved)


def compare_after_half(
    requests: Trace, *, is_hybrid: bool = False, percents: Sequence[float] = PERCENTS
) -> list[AfterShift]:
    """All policies at each capacity, in windows of the second half."""
    half = len(requests) // 2
    ends = [half + (len(requests) - half) * window // WINDOWS for window in range(WINDOWS + 1)]
    beginnings = [_pack(requests[:end]) for end in ends]
    total = beginnings[-1].total_bytes(is_hybrid)
    return [
        compare_after_shift(beginnings, capacity=int(total * percent / 100), is_hybrid=is_hybrid)
        for percent in percents
    ]


def _pack(requests: Trace) -> native.ReplayTrace:
    return pack_trace(
        TraceRequest(timestamp_ms=0, input_length=BLOCK_TOKENS * len(blocks), output_length=0, hash_ids=blocks)
        for blocks in requests
    )


def list_traces(file: Path | None, *, seed: int) -> Iterator[tuple[str, Trace]]:
    """Those of the file, whole, halved and from its end, and one of each generator."""
    if file is not None:
        whole: Trace = [request.full_blocks(BLOCK_TOKENS) for request in read_trace(file)]
        half = len(whole) // 2
        yield file.stem, whole
        yield f"{file.stem}, first half", whole[:half]
        yield f"{file.stem}, second half", whole[half:]
        yield f"{file.stem}, backwards", whole[::-1]
    for name, make in GENERATED.items():
        yield name, make(seed)


def _print_comparison(console: Console, requests: Trace, found: Comparison, percents: Sequence[float]) -> None:
    model = "hybrid" if found.is_hybrid else "plain"
    table = Table(
        box=None, pad_edge=False, title=f"{found.trace} ({model}; {describe(requests)})", title_justify="left"
    )
    for column in (
        "",
        *(f"hits {percent:g}%" for percent in percents),
        *(f"time {percent:g}%" for percent in percents),
    ):
        table.add_column(column, justify="right")
    for policy, rates in found.rates.items():
        table.add_row(policy, *(f"{share:.2f}" for share in (*rates, *found.saved[policy])))
    above = (*found.above_best, *found.saved_above_best)
    table.add_row("above the best other", *(f"{points:+.2f}" for points in above))
    console.print(table)
    for what, points in (("hits", found.above_best), ("time", found.saved_above_best)):
        console.print(f"{what}: in sum {sum(points):+.2f}, at worst {min(points):+.2f}")
    console.print()


def _print_after_shift(console: Console, after: Sequence[AfterShift], percents: Sequence[float]) -> None:
    share = after[0].window_percent
    table = Table(box=None, pad_edge=False, title="hits above the best other, after the shift", title_justify="left")
    for column in ("memory", *(f"to {share * (window + 1):g}%" for window in range(WINDOWS)), "near after"):
        table.add_column(column, justify="right")
    for percent, found in zip(percents, after, strict=True):
        points = (f"{points:+.2f}" for points in found.above_best(DEFAULT_POLICY))
        table.add_row(f"{percent:g}%", *points, f"{found.near_after_percent(DEFAULT_POLICY):g}%")
    console.print(table)
    console.print()


def _after_shift_json(after: Sequence[AfterShift]) -> dict[str, object]:
    return {
        "after_shift_points": [[round(points, 3) for points in found.above_best(DEFAULT_POLICY)] for found in after],
        "near_after_shift_percent": [found.near_after_percent(DEFAULT_POLICY) for found in after],
    }


def _as_json(found: Comparison, percents: Sequence[float], after: Sequence[AfterShift]) -> str:
    return json.dumps(
        {
            "trace": found.trace,
            "model": "hybrid" if found.is_hybrid else "plain",
            "capacity_percents": list(percents),
            "hit_rates_percent": {policy: [round(rate, 3) for rate in rates] for policy, rates in found.rates.items()},
            "above_best_points": [round(points, 3) for points in found.above_best],
            "saved_time_percent": {
                policy: [round(share, 3) for share in shares] for policy, shares in found.saved.items()
            },
            "saved_time_above_best_points": [round(points, 3) for points in found.saved_above_best],
            **(_after_shift_json(after) if after else {}),
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace as `kvoffload replay` reads it, beside the generated ones")
    parser.add_argument("--seed", type=int, default=1, help="of the generated traces")
    parser.add_argument(
        "--prefill-cost", type=parse_prefill_cost, default=COST, help="as of `kvoffload replay`", metavar="US[,US]"
    )
    parser.add_argument("--hybrid", action="store_true", help="of each trace a hybrid model's replay, too")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    console = Console(width=160)
    all_found = []
    for name, requests in list_traces(options.trace, seed=options.seed):
        for is_hybrid in (False, True) if options.hybrid else (False,):
            found = compare(name, requests, is_hybrid=is_hybrid, cost=options.prefill_cost)
            all_found.append(found)
            after = compare_after_half(requests, is_hybrid=is_hybrid) if name == SHIFTED else []
            if options.json:
                print(_as_json(found, PERCENTS, after), flush=True)
                continue
            _print_comparison(console, requests, found, PERCENTS)
            if after:
                _print_after_shift(console, after, PERCENTS)
    if not options.json:
        worst = min(all_found, key=lambda found: min(found.above_best))
        console.print(f"at worst {min(worst.above_best):+.2f}, on {worst.trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
