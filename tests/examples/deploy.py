"""Shared parts of the tests of `examples/deploy`: they read a command line as our own command does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from kvoffload.cli.app import make_app
from kvoffload.cli.config import parse_assignments
from kvoffload.config.sources import Settings, load_settings

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text()
GROUP = 10001


def read_command(words: Sequence[str], *, name: str = "serve", environment: dict[str, str] | None = None) -> Settings:
    """The settings of a `kvoffload NAME` as our command line takes it."""
    assert list(words[:2]) == ["kvoffload", name]
    commands: Any = typer.main.get_command(make_app())
    context = commands.commands[name].make_context(name, list(words[2:]))
    return load_settings(flags=parse_assignments(context.params["assignments"]), environment=environment or {}).settings


def read_entry() -> tuple[list[str], list[str]]:
    """Returns of the container what always runs, and its arguments unless others are given."""
    found = [re.findall(rf"^{name} (\[.*\])$", CONTAINER, re.M) for name in ("ENTRYPOINT", "CMD")]
    return json.loads(found[0][0]), json.loads(found[1][0])


def read_engine_command(words: Sequence[str]) -> Settings:
    """The settings that an engine of these arguments has."""
    (given,) = re.findall(r"--kv-transfer-config=(.*)", "\n".join(words))
    transfer = json.loads(given)
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("KVOffloadConnector", "kv_both")
    return load_settings(engine=transfer["kv_connector_extra_config"], environment={}).settings
