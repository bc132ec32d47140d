"""`kvoffload audit`: check that restored blocks change no answer of an engine."""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvoffload.cli.progress import progress
from kvoffload.errors import ConfigError, ServerError
from kvoffload.key_files import read_private_text

if TYPE_CHECKING:
    from kvoffload.audit.auditor import AuditPrompt, Verdict

DISAGREED = 1
NOTHING_AUDITED = 2
MAX_TOKEN_ID = 1 << 24
_SHOWN = 40
"""Characters of a token that are printed."""


def audit(
    engine: Annotated[str, typer.Argument(help="An OpenAI-compatible engine.", metavar="ADDRESS")],
    *,
    prompts: Annotated[int, typer.Option("--prompts", help="Number of prompts.", min=1, max=1000)] = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of each prompt.", min=2, max=1 << 20)] = 1025,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", help="Tokens of each answer.", min=2, max=256)] = 16,
    own_hits: Annotated[int, typer.Option("--own-hits", help="Answers by the engine's own cache.", min=2, max=64)] = 3,
    seed: Annotated[
        int | None, typer.Option("--seed", help="The seed of the first prompt.", min=0, max=1 << 31, show_default="any")
    ] = None,
    token_ids: Annotated[
        str, typer.Option("--token-ids", help="Token ids of which prompts are made.", metavar="FIRST-LAST")
    ] = "1000-30000",
    file: Annotated[
        str, typer.Option("--file", help="JSON lines with `prompt`, instead of made prompts.", metavar="FILE")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="One of the engine's models; else the first.")] = "",
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="The engine's API key, if it has one.", metavar="FILE")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one answer.", min=1, max=86400)] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Ask an engine the same prompts cold, by its own cache, and restored by its KV connector with its own cache
    emptied; 1 if answers disagree, 2 if nothing could be audited."""
    from kvoffload.audit.audited_engine import AuditedEngine
    from kvoffload.audit.auditor import Auditor
    from kvoffload.warm.json_client import JsonClient, find_model

    first = secrets.randbelow(1 << 31) if seed is None else seed
    chosen = _read_file(file, prompts, first) if file else _make_prompts(prompts, tokens, first, _read_ids(token_ids))
    key = "" if key_file is None else read_private_text(key_file).strip()
    # Users give the address that other clients want, too.
    client = JsonClient(engine.rstrip("/").removesuffix("/v1"), key=key, timeout_s=timeout)
    try:
        audited = AuditedEngine(client, model=model or find_model(client)[0], answer_tokens=answer_tokens)
    except ServerError as fault:
        typer.echo(f"kvoffload: {fault}", err=True)
        raise typer.Exit(NOTHING_AUDITED) from None
    with progress(None) as tell:
        verdict = Auditor(audited, own_hits=own_hits).run(chosen, tell=lambda doing: tell(doing, 0))
    print_verdict(verdict, first, as_json=as_json)
    if verdict.disagreed:
        raise typer.Exit(DISAGREED)
    if verdict.fault or not verdict.restored:
        raise typer.Exit(NOTHING_AUDITED)


def print_verdict(verdict: Verdict, seed: int, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_make_row(verdict, seed), allow_nan=False))
        return
    for line in make_lines(verdict, seed):
        typer.echo(line)
    if verdict.fault:
        typer.echo(f"kvoffload: {verdict.fault}", err=True)


def make_lines(verdict: Verdict, seed: int) -> Iterator[str]:
    """Makes the lines that tell a verdict to a reader."""
    disagree = f", {verdict.disagreed} disagree" if verdict.disagreed else ""
    yield f"{verdict.prompts} prompts, {verdict.restored} restored: {verdict.agreed} agree{disagree} (seed {seed})"
    if verdict.restored:
        own = "equal" if verdict.is_exact else "not equal"
        yield f"the engine's own hits are {own}; its own answers, the cold ones too, differ by {verdict.bound:.6g}"
        yield f"restored answers differ from own hits by {verdict.largest:.6g}"
    if verdict.otherwise:
        yield f"{verdict.otherwise} were restored to another length than own hits have, and are compared less strictly"
    for why, count in verdict.why_not.items():
        yield f"{count} not audited: {why}"
    if (found := verdict.unlike) is not None:
        made = "" if found.prompt.seed is None else f" (--seed {found.prompt.seed} --prompts 1)"
        own, restored = _show(found.own), _show(found.restored)
        yield f"prompt {found.prompt.number}{made}, token {found.position + 1}: own hit {own}, restored {restored}"


def _make_row(verdict: Verdict, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seed": seed,
        "prompts": verdict.prompts,
        "restored": verdict.restored,
        "agreed": verdict.agreed,
        "disagreed": verdict.disagreed,
        "own_hits_equal": verdict.is_exact,
        "other_lengths": verdict.otherwise,
        "bound": verdict.bound,
        "largest_difference": verdict.largest,
        "not_audited": dict(verdict.why_not),
        "fault": verdict.fault,
    }
    if (found := verdict.unlike) is not None:
        row["first_disagreement"] = {
            "prompt": found.prompt.number,
            "seed": found.prompt.seed,
            "token": found.position + 1,
            "own_hit": found.own,
            "restored": found.restored,
        }
    return row


def _show(step: tuple[str, float] | None) -> str:
    """Shows a token without what a terminal would take for a command, and its logprob with all digits."""
    return "has ended" if step is None else f"{json.dumps(step[0])[:_SHOWN]} {step[1]!r}"


def _make_prompts(count: int, tokens: int, seed: int, ids: range) -> list[AuditPrompt]:
    from kvoffload.audit.auditor import AuditPrompt

    made = (random.Random(seed + at).choices(ids, k=tokens) for at in range(count))
    return [AuditPrompt(at + 1, text, seed=seed + at) for at, text in enumerate(made)]


def _read_ids(text: str) -> range:
    found = re.fullmatch(r"([0-9]{1,8})-([0-9]{1,8})", text)
    ids = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if len(ids) < 2 or ids[-1] > MAX_TOKEN_ID:
        raise ConfigError(f"--token-ids is {text!r}", remedy="give two numbers, such as 1000-30000")
    return ids


def _read_file(name: str, count: int, seed: int) -> list[AuditPrompt]:
    """Reads the first prompts of a file. Their salts make the engine compute them, even if it knows them."""
    from kvoffload.audit.auditor import AuditPrompt
    from kvoffload.warm.prompt_file import BadLine, open_prompts, read_prompts

    chosen = []
    with open_prompts(name) as file:
        for at, one in enumerate(islice(read_prompts(file), count)):
            if isinstance(one, BadLine):
                raise ConfigError(f"{name}: line {one.line} {one.why}", remedy="write a JSON object with `prompt`")
            if one.kind != "prompt":
                raise ConfigError(
                    f"{name}: line {one.line} has `messages`", remedy="write `prompt`, as text or as tokens"
                )
            chosen.append(AuditPrompt(at + 1, one.body["prompt"], salt=f"kvoffload audit {seed} {at}"))
    if not chosen:
        raise ConfigError(f"{name} has no prompts", remedy="write a JSON object with `prompt` in each line")
    return chosen
