"""`kvoffload`: the commands, and the one place where a fault becomes a line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import typer

from kvoffload import __version__
from kvoffload.errors import KVOffloadError


def make_app(only: str = "") -> typer.Typer:
    """Makes all commands; or one of them, with the modules of no other: an engine waits for `serve`."""
    app = _make_root()
    for name, command in _COMMANDS.items():
        if only in ("", name):
            command.add(app)
    return app


def make_list() -> typer.Typer:
    """Lists the names of all commands and what they do, with the modules of none: to be read, not to be run."""
    app = _make_root()
    for name, command in _COMMANDS.items():
        app.command(name, short_help=command.short_help)(_root)
    return app


def _make_root() -> typer.Typer:
    app = typer.Typer(
        name="kvoffload",
        help="KV-cache offloading for LLM engines.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return app


def main() -> None:
    """Entry point of the console script: no traceback for what the world or a user got wrong."""
    asked = next(iter(sys.argv[1:]), "")
    # A shell that completes a line also calls us without an argument; it wants to know options, and does not show the
    # list.
    is_list = asked in ("-h", "--help", "--version") or (not asked and sys.stdout.isatty())
    app = make_list() if is_list else make_app(asked if asked in _COMMANDS else "")
    try:
        app()
    except KVOffloadError as fault:
        typer.echo(f"kvoffload: {' '.join(str(fault).split())}", err=True)
        sys.exit(fault.exit_code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvoffload {__version__}")
        raise typer.Exit


def _root(
    _version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def _add_audit(app: typer.Typer) -> None:
    from kvoffload.cli.audit import audit

    app.command(short_help=_COMMANDS["audit"].short_help)(audit)


def _add_bench(app: typer.Typer) -> None:
    from kvoffload.cli.bench import bench

    app.command()(bench)


def _add_config(app: typer.Typer) -> None:
    from kvoffload.cli.config import config_app

    app.add_typer(config_app, name="config")


def _add_doctor(app: typer.Typer) -> None:
    from kvoffload.cli.config import CommandWithSettings
    from kvoffload.cli.doctor import doctor

    app.command(cls=CommandWithSettings, short_help=_COMMANDS["doctor"].short_help)(doctor)


def _add_inspect(app: typer.Typer) -> None:
    from kvoffload.cli.inspect import inspect_app

    app.add_typer(inspect_app, name="inspect")


def _add_keys(app: typer.Typer) -> None:
    from kvoffload.cli.keys import keys_app

    app.add_typer(keys_app, name="keys")


def _add_plan(app: typer.Typer) -> None:
    from kvoffload.cli.plan import plan

    app.command(short_help=_COMMANDS["plan"].short_help)(plan)


def _add_replay(app: typer.Typer) -> None:
    from kvoffload.cli.replay import replay

    app.command(short_help=_COMMANDS["replay"].short_help)(replay)


def _add_serve(app: typer.Typer) -> None:
    from kvoffload.cli.config import CommandWithSettings
    from kvoffload.cli.serve import serve

    app.command(cls=CommandWithSettings, short_help=_COMMANDS["serve"].short_help)(serve)


def _add_top(app: typer.Typer) -> None:
    from kvoffload.cli.config import CommandWithSettings
    from kvoffload.cli.top import top

    app.command(cls=CommandWithSettings, short_help=_COMMANDS["top"].short_help)(top)


def _add_web(app: typer.Typer) -> None:
    from kvoffload.cli.config import CommandWithSettings
    from kvoffload.cli.web import web

    app.command(cls=CommandWithSettings, short_help=_COMMANDS["web"].short_help)(web)


def _add_warm(app: typer.Typer) -> None:
    from kvoffload.cli.warm import warm

    app.command(short_help=_COMMANDS["warm"].short_help)(warm)


class _Command(NamedTuple):
    add: Callable[[typer.Typer], None]
    short_help: str
    """The command's line in the list of commands."""


_COMMANDS = {
    "audit": _Command(_add_audit, "Check that restored blocks change no answer of an engine."),
    "bench": _Command(_add_bench, "Measure against this machine's limits."),
    "doctor": _Command(_add_doctor, "Check whether this machine is ready."),
    "plan": _Command(_add_plan, "Tell the size of a model's tokens, and how many fit."),
    "replay": _Command(_add_replay, "Replay a trace by each eviction policy."),
    "serve": _Command(_add_serve, "Serve cached blocks to this machine's engines."),
    "top": _Command(_add_top, "Watch a cache server; q ends it."),
    "warm": _Command(_add_warm, "Fill a pool before traffic."),
    "web": _Command(_add_web, "Answer HTTP for a cache server."),
    "config": _Command(_add_config, "Show settings and their sources."),
    "inspect": _Command(_add_inspect, "Look into a cache server, as its operator."),
    "keys": _Command(_add_keys, "Make keys for TCP connections, and keys that seal records."),
}
