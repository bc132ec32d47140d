"""`kvoffload warm`: fill a pool before traffic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffload.cli.progress import progress
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_private_text

if TYPE_CHECKING:
    from kvoffload.warm.warmer import Outcome

FAILED = 1
MAX_SHOWN = 10
"""Lines about prompts that failed, and about such that were not counted. The others are told as a number."""


@dataclass
class _Total:
    prompts: int = 0
    tokens: int = 0
    before: int = 0
    after: int = 0
    failed: int = 0
    uncounted: int = 0

    def add(self, outcome: Outcome) -> None:
        self.prompts += 1
        self.failed += bool(outcome.fault)
        self.uncounted += bool(outcome.uncounted)
        self.tokens += outcome.tokens
        self.before += outcome.before
        self.after += outcome.after


def warm(
    prompts: Annotated[
        str, typer.Argument(help="JSON lines with `prompt` or `messages`; - is the standard input.", metavar="FILE")
    ],
    *,
    engine: Annotated[str, typer.Option("--engine", help="An OpenAI-compatible engine.", metavar="ADDRESS")],
    cache: Annotated[
        str, typer.Option("--cache", help="The `kvoffload web` of its cache server.", metavar="ADDRESS")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The http_token_file of that `kvoffload web`.", metavar="FILE")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="The engine's API key, if it has one.", metavar="FILE")
    ] = None,
    identity: Annotated[
        str, typer.Option("--identity", help="First digits of the engine's identity, if its model has several.")
    ] = "",
    seed: Annotated[str, typer.Option("--seed", help="The engine's PYTHONHASHSEED, if it has one.")] = "",
    at_once: Annotated[
        int, typer.Option("--at-once", help="Prompts that the engine gets at a time.", min=1, max=256)
    ] = 4,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one prompt.", min=1, max=86400)] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Send prompts to an engine once each, so that what it computes is cached; 1 if one fails."""
    from kvoffload.warm.json_client import JsonClient, find_model
    from kvoffload.warm.prompt_file import open_prompts, read_prompts
    from kvoffload.warm.warmer import CacheQuestion, Warmer

    if not cache and (token_file or identity or seed):
        raise ConfigError("--token-file, --identity and --seed are of no use without --cache", remedy="give --cache")
    # Users give the address that other clients want, too.
    client = JsonClient(engine.rstrip("/").removesuffix("/v1"), key=_read(key_file), timeout_s=timeout)
    asked = JsonClient(cache, key=_read(token_file)) if cache else None
    total, faults = _Total(), []
    with open_prompts(prompts) as file:
        model, root = find_model(client)
        question = CacheQuestion(model="" if identity else root, identity=identity, seed=seed)
        warmer = Warmer(client, asked, at_once=at_once, model=model, question=question)
        with progress(None) as tell:
            for outcome in warmer.run(read_prompts(file)):
                total.add(outcome)
                tell(f"{total.tokens} tokens", 1)
                if outcome.fault and total.failed <= MAX_SHOWN:
                    faults.append(f"line {outcome.line} {outcome.fault}")
                if outcome.uncounted and total.uncounted <= MAX_SHOWN:
                    faults.append(f"line {outcome.line} computed, not counted: {outcome.uncounted}")
    for line in faults:
        typer.echo(line, err=True)
    print_total(total, is_asked=asked is not None, as_json=as_json)
    if total.failed:
        raise typer.Exit(FAILED)


def print_total(total: _Total, *, is_asked: bool, as_json: bool) -> None:
    row = {"prompts": total.prompts, "failed": total.failed, "tokens": total.tokens}
    if is_asked:
        row |= {"there_before": total.before, "warmed": max(total.after - total.before, 0), "there": total.after}
        row |= {"uncounted": total.uncounted}
    if as_json:
        typer.echo(json.dumps(row))
        return
    typer.echo(f"{total.prompts} prompts, {total.failed} failed; {total.tokens} tokens computed or loaded")
    if is_asked:
        typer.echo(f"{row['there']} tokens are there: {row['there_before']} were before, {row['warmed']} are new")
        if total.uncounted:
            typer.echo(f"{total.uncounted} prompts were computed, and are not counted in this")


def _read(file: Path | None) -> str:
    return "" if file is None else read_private_text(file).strip()
