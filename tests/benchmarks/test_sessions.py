"""Agents' sessions on the proving ground: hints keep what they have, and cost the others no more than its share."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

CLONE = Path(__file__).parents[2]
SHARE = 1 / 3
"""Of the pool, that sessions have at their ends."""


@cache
def rows() -> dict[str, dict[str, Any]]:
    """One run for all tests."""
    chosen = ["--short", "--models", "Llama-3.1-8B", "--scenarios", "keep_sessions"]
    command = [sys.executable, "-m", "benchmarks.scale", *chosen, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CLONE)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_sessions_hit_more_with_hints_than_any_pool_without() -> None:
    found = rows()["sessions' tokens hit"]
    assert found["value"] > 1.1 * found["without"]
    assert found["value"] > found["ideal"]
    assert found["ratio"] >= 0.85, "of what a pool without bounds has"


def test_others_lose_no_more_than_the_sessions_have() -> None:
    found = rows()["others' tokens hit"]
    assert found["value"] >= (1 - SHARE) * found["limit"]


def test_nothing_is_left() -> None:
    assert rows()["left at the end"]["value"] == 0
