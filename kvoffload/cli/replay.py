"""`kvoffload replay`: how much of a trace each eviction policy would have served."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cache.replay import OPTIMUM, ReplayResult, pack_trace, parse_capacities, parse_policies
from kvoffload.cache.replay import replay as replay_trace
from kvoffload.cache.trace import find_block_tokens, read_trace
from kvoffload.cli.line_chart import draw_shares
from kvoffload.cli.progress import progress
from kvoffload.errors import ConfigError


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with timestamp, input_length, output_length and hash_ids, sorted by timestamp."
        ),
    ],
    *,
    policy: Annotated[str, typer.Option("--policy", help="Names of policies, or all.", metavar="NAME[,NAME]")] = "all",
    capacity: Annotated[
        str,
        typer.Option("--capacity", help="Percentages of all distinct records of the trace.", metavar="PERCENT[,...]"),
    ] = "1,2,5,10,20",
    is_hybrid: Annotated[
        bool,
        typer.Option(
            "--hybrid", help="A model with a sliding window and recurrent states every 8 blocks, not attention alone."
        ),
    ] = False,
    block_tokens: Annotated[
        int | None,
        typer.Option("--block-tokens", help="Tokens that one id stands for; as the trace says, or 512.", min=1),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Write the hit rates as lines, an SVG file, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Replay a trace: share of its blocks served, by policy and capacity, beside the offline optimum."""
    policies, percents = parse_policies(policy), parse_capacities(capacity)
    if picture is not None:
        # Now, and not when all has been replayed.
        _write_picture(picture, "")
    results: list[ReplayResult] = []
    with progress(len(percents) * (len(policies) + 1)) as tell:
        tell("reading the trace", 0)
        block_tokens = block_tokens or find_block_tokens(trace)
        packed = pack_trace(read_trace(trace, block_tokens=block_tokens), block_tokens=block_tokens)
        tell("replaying", 0)
        for result in replay_trace(packed, policies=policies, capacity_percents=percents, is_hybrid=is_hybrid):
            results.append(result)
            tell(f"replayed {result.policy} at {result.capacity_percent:g}%", 1)
            if as_json:
                typer.echo(json.dumps(_as_json(result, is_hybrid=is_hybrid)))
    if picture is not None:
        _write_picture(picture, _draw(trace.name, results))
    if not as_json:
        # A pipe has no width; a table cut to rich's 80 columns would hide the numbers.
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(_hits_table(results))
        if is_hybrid:
            console.print(_useless_table(results))


def _write_picture(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as fault:
        raise ConfigError(
            f"--picture {file} cannot be written: {fault.strerror}", remedy="name a file in a folder of yours"
        ) from None


def _draw(name: str, results: list[ReplayResult]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in sorted(results, key=lambda result: result.capacity_percent):
        lines.setdefault(result.policy, []).append((result.capacity_percent, result.hit_rate))
    across = "capacity, in percent of all distinct records of the trace"
    return draw_shares(f"Share of blocks that were there: {name}", across, lines, dashed=OPTIMUM)


def _as_json(result: ReplayResult, *, is_hybrid: bool) -> dict[str, object]:
    return {
        "model": "hybrid" if is_hybrid else "plain",
        "policy": result.policy,
        "capacity_percent": result.capacity_percent,
        "capacity_units": result.capacity_units,
        "hit_rate": round(result.hit_rate, 6),
        "hits": result.hits,
        "references": result.references,
        "useless_share": None if result.useless_share is None else round(result.useless_share, 6),
    }


def _hits_table(results: list[ReplayResult]) -> Table:
    return _table("capacity", results, [f"{result.hit_rate:.1%}" for result in results])


def _useless_table(results: list[ReplayResult]) -> Table:
    cells = ["" if result.useless_share is None else f"{result.useless_share:.1%}" for result in results]
    return _table("of no use", results, cells)


def _table(corner: str, results: list[ReplayResult], cells: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(corner, justify="right")
    policies = list(dict.fromkeys(result.policy for result in results))
    for policy in policies:
        table.add_column(policy, justify="right")
    for begin in range(0, len(results), len(policies)):
        table.add_row(f"{results[begin].capacity_percent:g}%", *cells[begin : begin + len(policies)])
    return table
