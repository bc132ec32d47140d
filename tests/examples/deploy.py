"""Shared parts of the tests of `examples/deploy`: they read a command line as our own command does, and find programs
that check files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from kvoffload.cli.app import make_app
from kvoffload.cli.config import parse_assignments
from kvoffload.config.sources import Settings, load_settings
from tests.kit.tiers.valkey_server import DEBIAN

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text()
GROUP = 10001
KUBERNETES = ("1.28", "1.34", "1.37")
"""Versions whose schemas our examples follow."""


def find_program(name: str) -> str:
    """Finds one of Debian's programs of Prometheus. The test is skipped if it is missing."""
    own = DEBIAN / "usr/bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: Debian's prometheus could not be had by make setup")
    return found


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
