"""`kvoffload`: the commands, and the one place where a fault becomes a line and an exit code."""

from __future__ import annotations

import sys

import typer

from kvoffload import __version__
from kvoffload.cli.bench import bench
from kvoffload.cli.config import config_app
from kvoffload.cli.doctor import doctor
from kvoffload.cli.inspect import inspect_app
from kvoffload.cli.keys import keys_app
from kvoffload.cli.plan import plan
from kvoffload.cli.replay import replay
from kvoffload.cli.serve import serve
from kvoffload.cli.top import top
from kvoffload.cli.web import web
from kvoffload.errors import KVOffloadError

app = typer.Typer(
    name="kvoffload",
    help="KV-cache offloading for LLM engines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_app, name="config")
app.add_typer(inspect_app, name="inspect")
app.add_typer(keys_app, name="keys")
app.command()(bench)
app.command(short_help="Check whether this machine is ready.")(doctor)
app.command(short_help="Say what a model's tokens take, and how many fit.")(plan)
app.command(short_help="Replay a trace by each eviction policy.")(replay)
app.command(short_help="Serve cached blocks to this machine's engines.")(serve)
app.command(short_help="Watch a cache server; q ends it.")(top)
app.command(short_help="Answer HTTP for a cache server.")(web)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvoffload {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script: no traceback for what the world or a user got wrong."""
    try:
        app()
    except KVOffloadError as fault:
        typer.echo(f"kvoffload: {' '.join(str(fault).split())}", err=True)
        sys.exit(fault.exit_code)
