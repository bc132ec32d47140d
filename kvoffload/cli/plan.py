"""`kvoffload plan`: what a model's tokens take in the cache, how many fit, and when loading them pays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.errors import ConfigError
from kvoffload.plan.element import DTYPES
from kvoffload.plan.exact import ask_vllm
from kvoffload.plan.model_shape import ShapeSettings, read_config, read_shape
from kvoffload.plan.sglang_pages import PageSettings, read_pages
from kvoffload.plan.sizing import Conversation, Holding, Place, Sizing, hold, size_model
from kvoffload.units import format_duration, format_size, parse_size

VLLM, SGLANG = "vllm", "sglang"
ENGINES = (VLLM, SGLANG)
LINK = "25GB/s"
DISK = "3GB/s"
FIXED_S = 0.002
"""Of any load: an acquire, a step of the engine, the first copy."""
T = TypeVar("T")


def plan(
    model: Annotated[Path, typer.Argument(help="A model's folder, or its config.json.")],
    *,
    memory: Annotated[str, typer.Option("--memory", help="Size of the pool, such as 512GiB.")] = "64GiB",
    disk: Annotated[str, typer.Option("--disk", help="Size of a disk tier; 0 for none.")] = "0",
    engine: Annotated[str, typer.Option("--engine", help=f"{' or '.join(ENGINES)}.")] = VLLM,
    page_size: Annotated[
        int, typer.Option("--page-size", help="SGLang's: tokens of a page; 0: as SGLang has it by itself, 1.", min=0)
    ] = 0,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help=f"As vLLM has it: {', '.join(DTYPES)}.")] = "auto",
    state_dtype: Annotated[str, typer.Option("--state-dtype", help="vLLM's mamba_ssm_cache_dtype.")] = "auto",
    ranks: Annotated[int, typer.Option("--ranks", help="Number of ranks of tensor parallelism.", min=1, max=1024)] = 1,
    conversation: Annotated[int, typer.Option("--tokens", help="Tokens of a conversation at its end.", min=1)] = 8000,
    turns: Annotated[int, typer.Option("--turns", help="Number of turns of a conversation.", min=1)] = 8,
    link: Annotated[
        str, typer.Option("--link", help="Bytes a second from memory to the accelerators.", metavar="RATE")
    ] = LINK,
    disk_rate: Annotated[
        str, typer.Option("--disk-rate", help="Bytes a second from the disk to memory.", metavar="RATE")
    ] = DISK,
    prefill: Annotated[
        float, typer.Option("--prefill", help="Tokens that are computed a second, as measured; 0: unknown.", min=0)
    ] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="Ask vLLM, where it is installed; about 20 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what a model's tokens take in the cache, how many fit, and from where on loading them beats computing."""
    shape_settings = ShapeSettings(kv_dtype=kv_dtype, state_dtype=state_dtype, ranks=ranks)
    _check_engine(engine, page_size, exact=exact)
    pages = PageSettings(shape=shape_settings, page_tokens=page_size or 1) if engine == SGLANG else None
    if pages is not None:
        shape = read_pages(read_config(model), pages)
    else:
        shape = (ask_vllm if exact else read_shape)(read_config(model), shape_settings)
    sizing = size_model(shape)
    talk = Conversation(tokens=conversation, turns=turns)
    places = [Place(name="memory", size_bytes=_read("memory", memory, parse_size), bytes_per_s=_rate("link", link))]
    disk_bytes = _read("disk", disk, parse_size)
    if disk_bytes:
        # Records from the disk go to memory first, and from there as fast as the link lets them.
        slower = min(_rate("disk-rate", disk_rate), places[0].bytes_per_s)
        places.append(Place(name="disk", size_bytes=disk_bytes, bytes_per_s=slower))
    holdings = list(hold(sizing, places, talk, prefill=prefill, fixed_s=FIXED_S))
    if as_json:
        typer.echo(json.dumps(_as_json(shape.model_type, sizing, talk, holdings, pages)))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_groups_table(sizing, pages))
    console.print(_describe(sizing, talk))
    console.print(_places_table(holdings, prefill))
    console.print(f"\nTo begin with:\n{_suggest(places)}", highlight=False, markup=False)


def _check_engine(engine: str, page_size: int, *, exact: bool) -> None:
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r} is not known", remedy=f"allowed are {', '.join(ENGINES)}")
    if engine == VLLM and page_size:
        raise ConfigError("--page-size is SGLang's", remedy=f"add --engine {SGLANG}, or leave it out")
    if engine == SGLANG and exact:
        raise ConfigError("--exact asks vLLM, and not SGLang", remedy="leave it out")


def _read(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as fault:
        raise ConfigError(f"--{name} {text!r}: {fault}", remedy="give a size such as 512GiB") from None


def _rate(name: str, text: str) -> float:
    """Reads bytes a second of `25GB/s`."""
    amount, slash, unit = text.partition("/")
    if not slash or unit.strip() != "s":
        raise ConfigError(f"--{name} {text!r} is no rate", remedy="give one such as 25GB/s")
    rate = _read(name, amount.strip(), parse_size)
    if not rate:
        raise ConfigError(f"--{name} {text!r} is no rate", remedy="give more than nothing")
    return float(rate)


def _groups_table(sizing: Sizing, pages: PageSettings | None) -> Table:
    """With `pages`, a column has the bytes of a record on each rank."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    more = () if pages is None else ("bytes a record",)
    for column in ("layers", "of", "a hit needs", "bytes a token", "bytes a state", "window", *more):
        table.add_column(column, justify="left" if column in ("of", "a hit needs") else "right")
    for group in sizing.groups:
        table.add_row(
            str(group.layers),
            group.what,
            group.keeps.value,
            f"{group.token_bytes:,}" if group.token_bytes else "",
            f"{group.state_bytes:,}" if group.state_bytes else "",
            f"{group.window_tokens:,}" if group.window_tokens else "",
            *([] if pages is None else [f"{pages.record_bytes(group):,}"]),
        )
    return table


def _describe(sizing: Sizing, talk: Conversation) -> str:
    each = sizing.conversation_bytes(talk)
    ends = sizing.end_bytes(talk.tokens)
    beside = f", and {ends:,} bytes at each place where a hit may end" if ends else ""
    return (
        f"\nA token takes {sizing.token_bytes:,} bytes{beside}. A conversation of {talk.tokens:,} tokens in "
        f"{talk.turns} turns takes {each / 1e9:.3g} GB.\n"
    )


def _places_table(holdings: list[Holding], prefill: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("place", "size", "tokens", "conversations", "load of 1,000 tokens", "faster than computing from"):
        table.add_column(column, justify="left" if column == "place" else "right")
    for one in holdings:
        known = "never" if one.break_even_tokens is None else f"{one.break_even_tokens:,} tokens"
        table.add_row(
            one.place.name,
            format_size(one.place.size_bytes),
            f"{one.tokens:,}",
            f"{one.conversations:,}",
            format_duration(float(f"{one.load_s:.3g}")),
            known if prefill else "unknown without --prefill",
        )
    return table


def _suggest(places: list[Place]) -> str:
    lines = [f'memory = "{format_size(places[0].size_bytes)}"']
    if len(places) > 1:
        lines += ['disk = "/nvme0/kvoffload"', f'disk_size = "{format_size(places[1].size_bytes)}"']
    return "\n".join(lines)


def _as_json(
    model_type: str, sizing: Sizing, talk: Conversation, holdings: list[Holding], pages: PageSettings | None
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "token_bytes": sizing.token_bytes,
        "end_bytes": sizing.end_bytes(talk.tokens),
        "conversation_bytes": sizing.conversation_bytes(talk),
        "groups": [
            {
                "layers": group.layers,
                "what": group.what,
                "keeps": group.keeps.value,
                "token_bytes": group.token_bytes,
                "window_tokens": group.window_tokens,
                "state_bytes": group.state_bytes,
                **({} if pages is None else {"record_bytes": pages.record_bytes(group)}),
            }
            for group in sizing.groups
        ],
        "places": [
            {
                "name": one.place.name,
                "size_bytes": one.place.size_bytes,
                "tokens": one.tokens,
                "conversations": one.conversations,
                "load_1000_s": one.load_s,
                "break_even_tokens": one.break_even_tokens,
            }
            for one in holdings
        ],
    }
