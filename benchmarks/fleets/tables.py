"""Tables from a file of results, some of which docs/fleet.md shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fleets.sweeps import LINES, MIDDLE, NODES, TFLOPS, WINDOW_REQUESTS

Rows = Sequence[dict[str, Any]]


def make_tables(rows: Rows) -> dict[str, str]:
    """By question, in Markdown."""
    return {
        "nodes: hit rate, %": _by_nodes(rows, "nodes", lambda row: f"{row['hit_rate']:.1%}"[:-1]),
        "nodes: time to first token, mean, s": _by_nodes(rows, "nodes", lambda row: f"{row['ttft_mean_s']:.2f}"),
        "nodes: bytes on the wire, GB a second and node": _by_nodes(rows, "nodes", _wire),
        "growth: hit rate, %": _by_nodes(rows, "growth", lambda row: f"{row['hit_rate']:.1%}"[:-1]),
        "places": _places(rows),
        "speeds": _speeds(rows),
        "homes": _homes(rows),
        "failures": _failures(rows),
    }


def _of(rows: Rows, question: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["question"] == question]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    bars = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in bars)


def _by_nodes(rows: Rows, question: str, show: Callable[[dict[str, Any]], str]) -> str:
    asked = _of(rows, question)
    cells = {(row["line"], row["nodes"]): show(row) for row in asked}
    lines = [line for line in LINES if (line, NODES[0]) in cells]
    return _table(["nodes", *map(str, NODES)], [[line, *(cells[line, nodes] for nodes in NODES)] for line in lines])


def _wire(row: dict[str, Any]) -> str:
    total = row["read_bytes"] + row["written_bytes"]
    return f"{total / row['duration_s'] / row['nodes'] / 1e9:.2f}" if total else "0"


def _places(rows: Rows) -> str:
    asked = _of(rows, "places")
    names = list(dict.fromkeys((row["line"], _place(row)) for row in asked))
    lines = []
    for line, place in names:
        cells = [f"{line}{', ' + place if place else ''}"]
        for routing in ("round robin", "least loaded", "prefix"):
            row = next(r for r in asked if (r["line"], _place(r), r["routing"]) == (line, place, routing))
            cells.append(f"{row['hit_rate']:.1%}, {row['ttft_mean_s']:.2f} s")
            if routing == "least loaded":
                blocks = row["too_slow_blocks"] + row["dropped_blocks"]
                moved = f"{row['read_bytes'] / 1e12:.1f}, {row['written_bytes'] / 1e12:.1f}"
                late = f"{row['too_slow_blocks']:,}, {row['dropped_blocks']:,}" if blocks else "0"
        lines.append([*cells, moved if place else "", late if place else ""])
    head = ["", "round robin", "least loaded", "prefix", "TB read, written", "blocks too slow to read, to write"]
    return _table(head, lines)


def _place(row: dict[str, Any]) -> str:
    return str(row["place"]) if row["kind"] in ("store", "homes", "peers") else ""


def _speeds(rows: Rows) -> str:
    asked = _of(rows, "speeds")
    cells = {(row["line"], row["tflops"]): f"{row['hit_rate']:.1%}, {row['ttft_mean_s']:.2f} s" for row in asked}
    lines = list(dict.fromkeys(row["line"] for row in asked))
    return _table(
        ["TFLOP/s of a node", *map(str, TFLOPS)], [[line, *(cells[line, speed] for speed in TFLOPS)] for line in lines]
    )


def _homes(rows: Rows) -> str:
    lines = []
    for row in _of(rows, "homes"):
        tokens = row.get("tokens_a_block", 512)
        run = f"{row['run_blocks'] * tokens:,}" if row["run_blocks"] else "whole prefix"
        is_pool = row["kind"] == "pool"
        lines.append(
            [
                row["line"],
                "" if is_pool else f"{tokens}",
                "" if is_pool else run,
                "" if is_pool else row["home_policy"] if row["home_share"] else row["policy"],
                f"{row['hit_rate']:.1%}",
                f"{row['ttft_mean_s']:.2f}",
                "" if is_pool else f"{row['busiest_served']:.1f}",
                "" if is_pool else f"{row['batches'] / row['completed']:.1f}",
                "" if is_pool else f"{row['dropped_blocks'] * tokens // 512:,}",
            ]
        )
    head = ["a node's memory", "tokens a block", "tokens a home", "policy", "hits", "TTFT, s", "busiest home"]
    return _table([*head, "batches a request", "512 tokens dropped"], lines)


def _failures(rows: Rows) -> str:
    asked = _of(rows, "failures")
    lines = []
    for line in dict.fromkeys(row["line"] for row in asked):
        by_event = {row["event"]: row for row in asked if row["line"] == line}
        whole, lost = by_event["none"], by_event["fails, joins"]
        begin = whole["event_requests"][0] // WINDOW_REQUESTS
        dips = [100 * (a - b) for a, b in zip(whole["hit_rates"], lost["hit_rates"], strict=True)][begin:]
        lines.append(
            [
                line,
                f"{whole['hit_rate']:.1%}",
                f"{by_event['fails']['hit_rate']:.1%}",
                f"{lost['hit_rate']:.1%}",
                f"{max(dips):.1f}",
                f"{whole['ttft_p99_s']:.1f}, {lost['ttft_p99_s']:.1f}",
                f"{lost['lost_blocks']:,}",
                f"{lost['rerouted']}",
            ]
        )
    head = [f"{MIDDLE} nodes", "hits", "one fails", "and joins", "worst 500 requests, points"]
    return _table([*head, "TTFT 99%, s: without, with", "blocks lost", "requests begun again"], lines)
