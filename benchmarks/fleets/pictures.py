"""The pictures of docs/fleet.md, from a file of results: the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleets.sweeps import LINES, NODES, TFLOPS, WINDOW_REQUESTS

Rows = Sequence[dict[str, Any]]

_COLORS = ("#888888", "#111111", "#d1495b", "#edae49", "#b07d12", "#00798c", "#30638e", "#8d6a9f", "#5aa02c")


def draw_all(rows: Rows, folder: Path) -> None:
    """Into an existing folder, or one that is made."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "kvoffload", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    draw_nodes(rows, folder / "fleet-nodes.svg")
    draw_speeds(rows, folder / "fleet-speeds.svg")
    draw_homes(rows, folder / "fleet-homes.svg")
    draw_failures(rows, folder / "fleet-failures.svg")


def draw_nodes(rows: Rows, path: Path) -> None:
    """Hit rate and time to first token over the number of nodes."""
    figure, (left, right) = _open(2)
    asked = [row for row in rows if row["question"] == "nodes"]
    for axes, title, show in (
        (left, "blocks served from a cache, %", lambda row: 100 * row["hit_rate"]),
        (right, "time to first token, mean, s", lambda row: row["ttft_mean_s"]),
    ):
        for line, color in zip(LINES, _COLORS, strict=True):
            values = [show(row) for row in asked if row["line"] == line]
            style = "--" if line == "one big pool" else "-"
            axes.plot(NODES, values, style, color=color, label=line, marker="o", markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(NODES, [str(nodes) for nodes in NODES])
        axes.set_xlabel("nodes")
        axes.set_title(title, loc="left")
        axes.set_ylim(bottom=0)
    _close(figure, path, left.get_legend_handles_labels(), columns=5)


def draw_speeds(rows: Rows, path: Path) -> None:
    """Draws the time that a remote spares over the speed at which a node computes."""
    figure, (left, right) = _open(2)
    asked = [row for row in rows if row["question"] == "speeds"]
    value = {(row["line"], row["tflops"]): row for row in asked}
    lines = list(dict.fromkeys(row["line"] for row in asked))
    for line, usual in zip(lines, _COLORS, strict=False):
        style = "--" if line == "one big pool" else "-"
        color = _COLORS[-1] if line == "one big pool" else usual
        hits = [100 * value[line, speed]["hit_rate"] for speed in TFLOPS]
        spared = [
            100 * (1 - value[line, speed]["ttft_mean_s"] / value["no remote", speed]["ttft_mean_s"]) for speed in TFLOPS
        ]
        left.plot(TFLOPS, hits, style, color=color, label=line, marker="o", markersize=3)
        right.plot(TFLOPS, spared, style, color=color, marker="o", markersize=3)
    left.set_title("blocks served from a cache, %", loc="left")
    right.set_title("time to first token spared, %", loc="left")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(TFLOPS, [str(speed) for speed in TFLOPS])
        axes.set_xlabel("TFLOP/s of a node")
    left.set_ylim(bottom=0)
    _close(figure, path, left.get_legend_handles_labels(), columns=4)


def draw_homes(rows: Rows, path: Path) -> None:
    """Hit rate and balance over how much of a prefix has one home."""
    figure, (left, right) = _open(2)
    asked = [
        row for row in rows if row["question"] == "homes" and row["line"] == "set aside" and "tokens_a_block" not in row
    ]
    limit = next(row for row in rows if row["question"] == "homes" and row["line"] == "one big pool")
    shows: tuple[tuple[Any, str, Callable[[dict[str, Any]], float]], ...] = (
        (left, "blocks served from a cache, %", lambda row: 100 * row["hit_rate"]),
        (right, "bytes from the busiest home, mean: 1", lambda row: row["busiest_served"]),
    )
    for axes, title, show in shows:
        for policy, color in (("lru", _COLORS[5]), ("prefix", _COLORS[2])):
            chosen = [row for row in asked if row["home_policy"] == policy]
            axes.plot(range(len(chosen)), [show(row) for row in chosen], color=color, marker="o", label=policy)
        runs = [row["run_blocks"] for row in asked if row["home_policy"] == "lru"]
        axes.set_xticks(range(len(runs)), [f"{512 * run:,}" if run else "all" for run in runs])
        axes.set_xlabel("tokens of a prefix that have one home")
        axes.set_title(title, loc="left")
    left.axhline(100 * limit["hit_rate"], color=_COLORS[8], linestyle="--", label="one big pool")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    _close(figure, path, left.get_legend_handles_labels(), columns=3)


def draw_failures(rows: Rows, path: Path) -> None:
    """Hit rate while a node fails and joins again, less that of the same fleet without."""
    figure, (axes,) = _open(1)
    asked = [row for row in rows if row["question"] == "failures"]
    for line in dict.fromkeys(row["line"] for row in asked):
        by_event = {row["event"]: row["hit_rates"] for row in asked if row["line"] == line}
        gaps = [100 * (b - a) for a, b in zip(by_event["none"], by_event["fails, joins"], strict=True)]
        color = _COLORS[list(LINES).index(line)]
        axes.plot([at * WINDOW_REQUESTS for at in range(len(gaps))], gaps, color=color, label=line)
    for request, label in zip(asked[0]["event_requests"], ("fails", "joins"), strict=True):
        axes.axvline(request, color="#bbbbbb", linestyle=":")
        axes.annotate(label, (request, axes.get_ylim()[0]), color="#888888")
    axes.set_xlabel("requests")
    axes.set_title("hit rate beside the fleet without a failure, points", loc="left")
    _close(figure, path, axes.get_legend_handles_labels(), columns=3)


def _open(count: int) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(8.4, 3.2), squeeze=False)
    return figure, tuple(axes[0])


def _close(figure: Any, path: Path, legend: tuple[Any, Any], *, columns: int) -> None:
    from matplotlib import pyplot

    figure.legend(*legend, loc="lower center", ncols=columns, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 + 0.05 * -(-len(legend[0]) // columns), 1, 1))
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    # Lines end without blanks, as everything in the tree.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
