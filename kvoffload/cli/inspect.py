"""`kvoffload inspect`: what a cache server knows: engines and what they registered, retained prefixes, blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config.sources import load_shared
from kvoffload.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from kvoffload.client.client import Client
    from kvoffload.client.inspector import Inspector, Row

ANSWER_S = 5.0
ABSENT_S = 0.5
"""Seconds for which a server is looked for at an address that does not answer."""
_LOOK = "see what `kvoffload doctor` says with the same settings"
MISSING = 1
_HASH_DIGITS = 64

inspect_app = typer.Typer(
    help="Look into a cache server, as its operator.", no_args_is_help=True, rich_markup_mode=None
)
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="The operator's token, if you are not the server's user.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@inspect_app.command(short_help="Joined engines, their processes, and observers.")
def sessions(
    file: ConfigOption = None, assignments: SetOption = None, token: TokenOption = None, *, as_json: JsonOption = False
) -> None:
    """Joined engines with their processes, and observers."""
    with _inspecting(file, assignments, token) as inspector:
        _show(inspector.list_sessions(), as_json=as_json, nothing="no process has joined")


@inspect_app.command(short_help="Agents' sessions: turns, hits, seconds saved.")
def agents(
    file: ConfigOption = None, assignments: SetOption = None, token: TokenOption = None, *, as_json: JsonOption = False
) -> None:
    """Agents' sessions (requests with the same `session`), and what each got from the cache."""
    with _inspecting(file, assignments, token) as inspector:
        _show(inspector.list_agents(), as_json=as_json, nothing="no request has named a session yet")


@inspect_app.command(short_help="Models that have blocks, and their geometry.")
def identities(
    file: ConfigOption = None,
    assignments: SetOption = None,
    token: TokenOption = None,
    *,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show only in what identities of the same weights differ, with the values.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Models that have blocks, with the geometry of their groups."""
    with _inspecting(file, assignments, token) as inspector:
        rows = inspector.list_differences() if diff else inspector.list_identities()
    if diff:
        _show(rows, as_json=as_json, nothing="no two engines that have registered differ")
        return
    if as_json or not rows:
        _show(rows, as_json=as_json, nothing="no engine has registered yet")
        return
    for row in rows:
        typer.echo(draw_identity(row))


@inspect_app.command(short_help="A worker's KV allocations, byte by byte.")
def report(
    engine: Annotated[str, typer.Argument(help="An engine of `sessions`; may be left out if there is one.")] = "",
    rank: Annotated[int, typer.Option("--rank", help="Rank of the worker.", min=0)] = 0,
    file: ConfigOption = None,
    assignments: SetOption = None,
    token: TokenOption = None,
) -> None:
    """A worker's registered KV allocations: every byte, by owner."""
    with _inspecting(file, assignments, token) as inspector:
        text = inspector.read_report(engine, rank)
    typer.echo(text)


@inspect_app.command(short_help="Blocks in memory, by the beginning of their hashes.")
def blocks(
    prefix: Annotated[str, typer.Argument(help="First hexadecimal digits of the blocks' hashes.")] = "",
    count: Annotated[int, typer.Option("--count", help="Blocks to show.", min=1, max=65_536)] = 20,
    file: ConfigOption = None,
    assignments: SetOption = None,
    token: TokenOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Blocks in memory, by the beginning of their hashes."""
    beginning = parse_hash(prefix)
    with _inspecting(file, assignments, token) as inspector:
        rows, total = inspector.find_blocks(beginning, count)
    _show(rows, as_json=as_json, nothing=f"no block in memory has a hash that begins with {prefix or 'anything'}")
    if not as_json and total > len(rows):
        typer.echo(f"{total - len(rows):,} more: say more digits, or --count")
    if not rows:
        raise typer.Exit(MISSING)


@inspect_app.command(short_help="Where one block is, and what became of it.")
def block(
    name: Annotated[str, typer.Argument(metavar="HASH", help="Its hash, or as much of it as no other begins with.")],
    file: ConfigOption = None,
    assignments: SetOption = None,
    token: TokenOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """One block's life: where it is, since when, and what became of it."""
    beginning = parse_hash(name)
    with _inspecting(file, assignments, token) as inspector:
        if len(name) < _HASH_DIGITS:
            rows, total = inspector.find_blocks(beginning, 64)
            found = {row["hash"] for row in rows}
            if total > len(rows) or len(found) != 1:
                several = f"{total:,} blocks in memory have" if total else "no block in memory has"
                remedy = "say more digits" if total else f"say all {_HASH_DIGITS} digits of one that has left"
                raise ConfigError(f"{several} a hash that begins with {name}", remedy=remedy)
            beginning = bytes.fromhex(found.pop())
        life = inspector.follow_block(beginning)
    _show(life, as_json=as_json, nothing=f"nothing is known of {beginning.hex()}")
    if not life:
        raise typer.Exit(MISSING)


@inspect_app.command(short_help="Prefixes that are kept from eviction by hints.")
def retained(
    file: ConfigOption = None, assignments: SetOption = None, token: TokenOption = None, *, as_json: JsonOption = False
) -> None:
    """Prefixes that are kept from eviction by hints, with what gives way first coming first."""
    with _inspecting(file, assignments, token) as inspector:
        rows, size_bytes, limit_bytes = inspector.list_retained()
    _show(rows, as_json=as_json, nothing="nothing is retained")
    if rows and not as_json:
        typer.echo(f"{size_bytes:,} bytes of {limit_bytes:,} that may be retained")


@inspect_app.command(short_help="Hits that less or more memory would have.")
def memory(
    file: ConfigOption = None, assignments: SetOption = None, token: TokenOption = None, *, as_json: JsonOption = False
) -> None:
    """The share of requested blocks that a quarter to four times the memory would have hit."""
    with _inspecting(file, assignments, token) as inspector:
        rows, asked, one_in = inspector.list_memories()
    basis = say_basis(asked, one_in)
    _show(rows, as_json=as_json, nothing=basis)
    if rows and not as_json:
        typer.echo(basis)


def say_basis(asked: int, one_in: int) -> str:
    """Describes the blocks on which the shares are based, or why there are none."""
    if asked:
        followed = "each is followed" if one_in == 1 else f"one of {one_in:,} is followed"
        return f"of {asked:,} blocks that engines loaded, or computed and saved; {followed}"
    why = "" if one_in == 1 else ", or a model has recurrent states and the pool is too large to follow each block"
    return f"nothing was asked for yet{why}"


def parse_hash(text: str) -> bytes:
    """Reads the bytes of a hash or its beginning. ConfigError: it is none."""
    try:
        parsed = bytes.fromhex(text)
    except ValueError:
        parsed = None
    if parsed is None or len(text) != 2 * len(parsed) or len(text) > _HASH_DIGITS:
        raise ConfigError(
            f"{text!r} is no hash", remedy=f"allowed is an even number of hexadecimal digits, {_HASH_DIGITS} at most"
        )
    return parsed


@contextmanager
def _inspecting(file: Path | None, assignments: list[str] | None, token: Path | None) -> Iterator[Inspector]:
    from kvoffload.client.client import Client
    from kvoffload.client.inspector import Inspector
    from kvoffload.client.joining import Member
    from kvoffload.client.settings import ClientSettings
    from kvoffload.key_files import read_private_text
    from kvoffload.protocol import Role

    settings = load_shared(file, parse_assignments(assignments or [])).settings
    said = "" if token is None else read_private_text(token).strip()
    member = Member(engine="inspect", role=Role.OBSERVER)
    with Client(ClientSettings(socket=Path(settings.server), member=member)) as client:
        _await_server(client, settings.server)
        yield Inspector(client.look_into, token=said)


def _await_server(client: Client, socket: str) -> None:
    """Waits for the server. ServerError: it is not to be had, and why. One that is not there is not waited for."""
    from kvoffload.client.settings import LinkState

    if client.wait_until_served(ABSENT_S):
        return
    if client.link.state is LinkState.DOWN or not client.wait_until_served(ANSWER_S):
        raise ServerError(client.fault or f"the cache server on {socket} did not answer in time", remedy=_LOOK)


def _show(rows: list[Row], *, as_json: bool, nothing: str) -> None:
    """Prints one line for each."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    if not rows:
        typer.echo(nothing)
        return
    # Users copy hashes: nothing is cut, however wide the terminal is.
    cells = [list(rows[0]), *([_word(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def draw_identity(row: Row) -> str:
    """Draws an identity as lines."""
    lines = [f"identity {row['fingerprint']}"]
    lines += [
        f"  {name:<18} {_word(row[name])}" for name in ("used_bytes", "hash_algorithm", "hash_block_tokens", "ranks")
    ]
    lines += [f"  group {at:<12} {_draw_group(group)}" for at, group in enumerate(row["groups"])]
    lines += [f"  {name:<18} {value}" for name, value in row["made_of"].items()]
    return "\n".join(lines)


def _draw_group(group: Row) -> str:
    window = f" of {group['window']} tokens" if group["window"] else ""
    shards = f" in each of {group['shards']} shards" if group["shards"] > 1 else ""
    return (
        f"{group['record_bytes']:,} bytes a block of {group['block_tokens']} tokens{shards}, "
        f"reuse by {group['reuse']}{window}"
    )
