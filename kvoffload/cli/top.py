"""`kvoffload top`: a cache server, live in a terminal."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config.sources import load_shared

if TYPE_CHECKING:
    from kvoffload.client.client import Client
    from kvoffload.client.inspector import EngineSurvey
    from kvoffload.top.ledger_rows import Prices
    from kvoffload.top.samples import Sample

ANSWER_S = 5.0
LOOK_S = 0.1
UNREACHABLE = 1


def top(
    file: ConfigOption = None,
    assignments: SetOption = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1, max=3600)] = 1.0,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the current state once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
) -> None:
    """Watch the cache server of these settings; q ends it."""
    from kvoffload.client.client import Client
    from kvoffload.client.joining import Member
    from kvoffload.client.settings import ClientSettings
    from kvoffload.protocol import Role
    from kvoffload.top.ledger_rows import Prices

    settings = load_shared(file, parse_assignments(assignments or [])).settings
    prices = Prices.from_settings(settings)
    member = Member(engine="top", role=Role.OBSERVER)
    client = Client(ClientSettings(socket=Path(settings.server), member=member)).start()
    try:
        client.wait_until_served(ANSWER_S)
        if once:
            look_once(client, settings.server, prices, as_json=as_json)
        else:
            watch(client, settings.server, interval, prices, as_json=as_json)
    finally:
        client.close()


def take_sample(client: Client, before: Sample | None = None) -> Sample:
    """Takes one sample. Waits for the client's call deadline at most."""
    from kvoffload.client.inspector import Inspector
    from kvoffload.errors import ServerError
    from kvoffload.top.samples import Sample

    try:
        stats = client.stats()
    except ServerError as fault:
        return Sample(time_s=time.monotonic(), stats=None, fault=client.fault or fault.message)
    insight = None
    with contextlib.suppress(ServerError):
        insight = client.insight()
    survey: EngineSurvey | None = None
    # A server that has refused once is not asked again: it counts refusals as errors.
    if before is None or before.survey is not None:
        with contextlib.suppress(ServerError):
            survey = Inspector(client.look_into).survey_engines()
    return Sample(time_s=time.monotonic(), stats=stats, insight=insight, survey=survey)


def look_once(client: Client, where: str, prices: Prices, *, as_json: bool) -> None:
    from rich.console import Console

    from kvoffload.top.samples import as_row, compare
    from kvoffload.top.screen import draw

    sample, end_s = take_sample(client), time.monotonic() + ANSWER_S
    while sample.stats is None and client.wait_until_served(0) and time.monotonic() < end_s:
        # A server that has just started takes its memory.
        time.sleep(LOOK_S)
        sample = take_sample(client)
    view = compare(None, sample, prices)
    if as_json:
        typer.echo(json.dumps(as_row(sample, view)))
    else:
        Console().print(draw(where, sample, view))
    if view is None:
        raise typer.Exit(UNREACHABLE)


def watch(client: Client, where: str, interval_s: float, prices: Prices, *, as_json: bool) -> None:
    """Shows samples until the user wants to leave, or the output is closed."""
    from rich.console import Console
    from rich.live import Live

    from kvoffload.top.keyboard import Keyboard
    from kvoffload.top.samples import as_row, compare
    from kvoffload.top.screen import draw

    before = None
    with Keyboard().listening() as keyboard:
        console = Console()
        # A pipe gets a look after the other.
        live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal and not as_json else None
        if live is not None:
            live.start()
        try:
            while True:
                sample = take_sample(client, before)
                view = compare(before, sample, prices)
                if live is not None:
                    live.update(draw(where, sample, view), refresh=True)
                elif as_json:
                    typer.echo(json.dumps(as_row(sample, view)))
                else:
                    console.print(draw(where, sample, view))
                before = sample
                if keyboard.wants_to_leave(interval_s):
                    return
        except BrokenPipeError:
            return
        finally:
            if live is not None:
                live.stop()
