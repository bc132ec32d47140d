"""`kvoffload replay`: how much of a trace each eviction policy would have served."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cache.benefit import (
    Benefit,
    BenefitSettings,
    PrefillCost,
    TraceSpan,
    parse_prefill_cost,
    reckon_benefit,
)
from kvoffload.cache.replay import OPTIMUM, ReplayResult, count_own_hits, pack_trace, parse_capacities, parse_policies
from kvoffload.cache.replay import replay as replay_trace
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.cache.trace import find_block_tokens, read_trace
from kvoffload.cli.line_chart import draw_amounts, draw_shares
from kvoffload.cli.progress import progress
from kvoffload.errors import ConfigError
from kvoffload.units import describe_size, parse_size


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
    token_bytes: Annotated[
        int,
        typer.Option("--token-bytes", help="KV of a token, as `kvoffload plan` says; for --memory, --prefill.", min=0),
    ] = 0,
    memory: Annotated[
        str, typer.Option("--memory", help="Sizes of pools, instead of --capacity.", metavar="SIZE[,...]")
    ] = "",
    prefill: Annotated[
        float,
        typer.Option("--prefill", help="Prompt tokens a second of one GPU; shows how many GPUs hits save.", min=0),
    ] = 0,
    prefill_cost: Annotated[
        str,
        typer.Option(
            "--prefill-cost",
            help="Microseconds to compute a token, and how many more for each 1,000 tokens before it; shows the time "
            "that hits save. The default is of 8 billion parameters on an H200.",
            metavar="US[,US]",
        ),
    ] = "21.6,0.9",
    own: Annotated[
        str,
        typer.Option(
            "--own",
            help="Size of the engines' own caches, all together. Their hits do not count as a benefit.",
            metavar="SIZE",
        ),
    ] = "0",
    price: Annotated[
        float, typer.Option("--gpu-price", help="Price of a GPU for an hour, in your currency.", min=0)
    ] = 0,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Write the hit rates, or with --prefill the GPUs, as lines: an SVG file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Replay a trace: the share of its blocks served, by policy and capacity, compared with the offline optimum."""
    policies, percents, cost = parse_policies(policy), parse_capacities(capacity), parse_prefill_cost(prefill_cost)
    own_bytes, pools = _size("own", own), [_size("memory", one) for one in memory.split(",") if memory]
    _check_benefit(token_bytes, is_wanted=bool(pools or own_bytes or prefill or price), is_hybrid=is_hybrid)
    if (own_bytes or price) and not prefill:
        raise ConfigError("--own and --gpu-price are of no use without --prefill", remedy="give --prefill")
    if picture is not None:
        # Now, and not when all has been replayed.
        _write_picture(picture, "")
    results: list[ReplayResult] = []
    span = TraceSpan()
    with progress((len(pools) or len(percents)) * (len(policies) + 1)) as tell:
        tell("reading the trace", 0)
        block_tokens = block_tokens or find_block_tokens(trace)
        settings = BenefitSettings(
            token_bytes=token_bytes, block_tokens=block_tokens, prefill=prefill, hour_price=price
        )
        packed = pack_trace(span.watch(read_trace(trace, block_tokens=block_tokens)), block_tokens=block_tokens)
        if pools:
            percents = tuple(settings.share_of(pool, packed.total_bytes(False)) for pool in pools)
        own_hits = count_own_hits(packed, own_bytes // settings.block_bytes) if own_bytes else 0
        tell("replaying", 0)
        for result in replay_trace(packed, policies=policies, capacity_percents=percents, is_hybrid=is_hybrid):
            results.append(result)
            tell(f"replayed {result.policy} at {result.capacity_percent:.3g}%", 1)
            if as_json and not prefill:
                typer.echo(json.dumps(_as_json(result, cost, block_tokens, is_hybrid=is_hybrid)))
    benefits = [
        reckon_benefit(settings, span, pool_blocks=result.capacity_units, hits=result.hits, own_hits=own_hits)
        for result in (results if prefill else ())
    ]
    if picture is not None:
        _write_picture(
            picture, _draw_benefits(trace.name, results, benefits) if prefill else _draw(trace.name, results)
        )
    if as_json:
        for result, benefit in zip(results, benefits, strict=False):
            line = _as_json(result, cost, block_tokens, is_hybrid=is_hybrid)
            typer.echo(json.dumps(line | asdict(benefit)))
        return
    # A pipe has no width; a table cut to rich's 80 columns would hide the numbers.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_hits_table(results))
    console.print(_saved_table(results, cost, block_tokens))
    if is_hybrid:
        console.print(_useless_table(results))
    if prefill:
        console.print(_benefit_table(_find_chosen(policies), results, benefits))


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text.strip())
    except ValueError as fault:
        raise ConfigError(f"--{option} {text!r}: {fault}", remedy="give a size such as 512GiB") from None


def _check_benefit(token_bytes: int, *, is_wanted: bool, is_hybrid: bool) -> None:
    if is_wanted and not token_bytes:
        raise ConfigError("how many bytes a token takes is not known", remedy="--token-bytes, as `kvoffload plan` says")
    if is_wanted and is_hybrid:
        raise ConfigError("a hybrid model's tokens take no fixed number of bytes", remedy="leave --hybrid out")


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


def _draw_benefits(name: str, results: list[ReplayResult], benefits: list[Benefit]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for result, benefit in sorted(zip(results, benefits, strict=True), key=lambda pair: pair[1].pool_bytes):
        lines.setdefault(result.policy, []).append((benefit.pool_bytes, benefit.accelerators))
    title = f"GPUs' worth of prefill that a pool spares: {name}"
    return draw_amounts(title, "size of the pool", lines, name_size=describe_size, dashed=OPTIMUM)


def _as_json(result: ReplayResult, cost: PrefillCost, block_tokens: int, *, is_hybrid: bool) -> dict[str, object]:
    return {
        "model": "hybrid" if is_hybrid else "plain",
        "policy": result.policy,
        "capacity_percent": result.capacity_percent,
        "capacity_units": result.capacity_units,
        "hit_rate": round(result.hit_rate, 6),
        "hits": result.hits,
        "references": result.references,
        "saved_s": round(result.saved_s(cost, block_tokens), 3),
        "saved_share": round(result.saved_share(cost, block_tokens), 6),
        "useless_share": None if result.useless_share is None else round(result.useless_share, 6),
    }


def _find_chosen(policies: Sequence[str]) -> str:
    """Finds the server's own policy, where it was replayed."""
    return DEFAULT_POLICY if DEFAULT_POLICY in policies else policies[0]


def _benefit_table(policy: str, results: list[ReplayResult], benefits: list[Benefit]) -> Table:
    """Makes the table of how much less is computed with one policy than with the engines' own caches alone."""
    table = Table(title=f"\nspared by policy {policy}", title_justify="left", box=None, pad_edge=False)
    is_priced = any(benefit.hour_price for benefit in benefits)
    for column in ("pool", "prompt tokens", "share", "GPU time", "GPUs", *(["money an hour"] if is_priced else [])):
        table.add_column(column, justify="right")
    for result, benefit in zip(results, benefits, strict=True):
        if result.policy == policy:
            table.add_row(
                describe_size(benefit.pool_bytes),
                f"{benefit.spared_tokens:,}",
                f"{benefit.spared_share:.1%}",
                f"{benefit.spared_s:,.0f} s",
                f"{benefit.accelerators:.2f}",
                *([f"{benefit.hour_price:,.2f}"] if is_priced else []),
            )
    return table


def _hits_table(results: list[ReplayResult]) -> Table:
    return _table("capacity", results, [f"{result.hit_rate:.1%}" for result in results])


def _saved_table(results: list[ReplayResult], cost: PrefillCost, block_tokens: int) -> Table:
    return _table("saved, s", results, [f"{result.saved_s(cost, block_tokens):,.1f}" for result in results])


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
        table.add_row(f"{results[begin].capacity_percent:.3g}%", *cells[begin : begin + len(policies)])
    return table
