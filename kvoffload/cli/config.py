"""`kvoffload config`: which settings hold, and where each value came from."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from kvoffload.config.secrets import mask_secrets
from kvoffload.config.sources import Settings, Source, describe_settings, format_shown, load_settings
from kvoffload.errors import ConfigError

NAME_COLUMN, VALUE_COLUMN = 24, 24

config_app = typer.Typer(help="Show settings and their sources.", no_args_is_help=True, rich_markup_mode=None)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.", metavar="FILE")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="One setting; may be repeated.", metavar="NAME=VALUE")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine-config", help="The engine's extra config, a JSON object.", metavar="JSON")
]


class CommandWithSettings(TyperCommand):
    """A command whose settings are given with --set. A setting that is given as an option is refused with the words
    that were meant."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses the command line. ConfigError: a setting is given as an option."""
        own = {option for parameter in self.params for option in parameter.opts}
        for word in itertools.takewhile(lambda one: one != "--", args):
            option, _, value = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            if option.startswith("--") and option not in own and name in Settings.model_fields:
                raise ConfigError(
                    f"{option} is a setting and no option", remedy=f"say --set {name}={mask_secrets(value) or 'VALUE'}"
                )
        return super().parse_args(ctx, args)


@config_app.callback()
def _group() -> None:
    # A callback keeps `config` a group while it has one command.
    pass


@config_app.command()
def show(
    file: ConfigOption = None,
    assignments: SetOption = None,
    engine: EngineOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only those that some source sets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print every setting with its value and source, without secrets."""
    loaded = load_settings(file=file, engine=parse_engine_config(engine), flags=parse_assignments(assignments or []))
    rows = [row for row in describe_settings() if not changed or loaded.sources[row.name] is not Source.DEFAULT]
    if as_json:
        for row in rows:
            value = getattr(loaded.settings, row.name)
            value = mask_secrets(value) if isinstance(value, str) else value
            typer.echo(json.dumps({"name": row.name, "value": value, "source": loaded.sources[row.name].value}))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for row in rows:
        value = format_shown(row.name, getattr(loaded.settings, row.name)) or "(empty)"
        typer.echo(f"{row.name:<{NAME_COLUMN}} {value:<{VALUE_COLUMN}} {loaded.sources[row.name].value}")
        meaning = f"{row.description} Allowed: {row.allowed}."
        typer.echo(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    "))


def parse_assignments(assignments: list[str]) -> dict[str, object]:
    """Reads `NAME=VALUE` texts as flags; the last of a name wins."""
    flags: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {mask_secrets(assignment)!r}: no '='", remedy="allowed is NAME=VALUE")
        flags[name.strip()] = value.strip()
    return flags


def parse_engine_config(text: str | None) -> dict[str, object]:
    """Reads the JSON object that vLLM calls kv_connector_extra_config."""
    if text is None:
        return {}
    remedy = 'allowed is a JSON object such as {"memory":"8GiB"}'
    try:
        value = json.loads(text)
    except ValueError as fault:
        raise ConfigError(f"--engine-config: {fault}", remedy=remedy) from fault
    if not isinstance(value, dict):
        raise ConfigError(f"--engine-config is a {type(value).__name__}", remedy=remedy)
    return value
