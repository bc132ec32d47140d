"""Importing kvoffload costs what it says: an engine's every process does it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "zmq", "pydantic", "numpy", "msgpack", "typer", "rich", "prometheus_client"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("kvoffload", set()),
        ("kvoffload.connector.plugin", set()),
        ("kvoffload.native", {"numpy"}),
        ("kvoffload.kvspec", {"numpy"}),
        ("kvoffload.transfer", {"numpy"}),
        ("kvoffload.config.sources", {"pydantic"}),
        ("kvoffload.protocol", {"msgpack"}),
        ("kvoffload.server", {"msgpack", "numpy"}),
        ("kvoffload.cli.app", HEAVY - {"torch", "vllm", "zmq"}),
    ],
)
def test_an_import_pulls_in_no_more_than_it_needs(module: str, allowed: set[str]) -> None:
    script = f"import {module}, sys; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= allowed
