"""`kvoffload`: the commands, and the one place where a fault becomes a line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from kvoffload import __version__
from kvoffload.errors import KVOffloadError


def make_app(only: str = "") -> typer.Typer:
    """All commands; or one of them, with the modules of no other: an engine waits for `serve`."""
    app = typer.Typer(
        name="kvoffload",
        help="KV-cache offloading for LLM engines.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, add in _COMMANDS.items():
        if only in ("", name):
            add(app)
    return app


def main() -> None:
    """Entry point of the console script: no traceback for what the world or a user got wrong."""
    asked = next(iter(sys.argv[1:]), "")
    app = make_app(asked if asked in _COMMANDS else "")
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


def _add_bench(app: typer.Typer) -> None:
    from kvoffload.cli.bench import bench

    app.command()(bench)


def _add_config(app: typer.Typer) -> None:
    from kvoffload.cli.config import config_app

    app.add_typer(config_app, name="config")


def _add_doctor(app: typer.Typer) -> None:
    from kvoffload.cli.doctor import doctor

    app.command(short_help="Check whether this machine is ready.")(doctor)


def _add_inspect(app: typer.Typer) -> None:
    from kvoffload.cli.inspect import inspect_app

    app.add_typer(inspect_app, name="inspect")


def _add_keys(app: typer.Typer) -> None:
    from kvoffload.cli.keys import keys_app

    app.add_typer(keys_app, name="keys")


def _add_plan(app: typer.Typer) -> None:
    from kvoffload.cli.plan import plan

    app.command(short_help="Say what a model's tokens take, and how many fit.")(plan)


def _add_replay(app: typer.Typer) -> None:
    from kvoffload.cli.replay import replay

    app.command(short_help="Replay a trace by each eviction policy.")(replay)


def _add_serve(app: typer.Typer) -> None:
    from kvoffload.cli.serve import serve

    app.command(short_help="Serve cached blocks to this machine's engines.")(serve)


def _add_top(app: typer.Typer) -> None:
    from kvoffload.cli.top import top

    app.command(short_help="Watch a cache server; q ends it.")(top)


def _add_web(app: typer.Typer) -> None:
    from kvoffload.cli.web import web

    app.command(short_help="Answer HTTP for a cache server.")(web)


_COMMANDS: dict[str, Callable[[typer.Typer], None]] = {
    "config": _add_config,
    "inspect": _add_inspect,
    "keys": _add_keys,
    "bench": _add_bench,
    "doctor": _add_doctor,
    "plan": _add_plan,
    "replay": _add_replay,
    "serve": _add_serve,
    "top": _add_top,
    "web": _add_web,
}
