"""The proving ground's short form: what must hold at the sizes of real models. Counts and shares, no times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

CLONE = Path(__file__).parents[2]
MODELS = ("Llama-3.1-70B", "gpt-oss-120b")
RUNNERS = (1, 2)


@cache
def rows() -> list[dict[str, Any]]:
    """One run for all tests."""
    command = [sys.executable, "-m", "benchmarks.scale", "--short", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CLONE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def find(name: str, **params: object) -> Iterator[dict[str, Any]]:
    found = [row for row in rows() if row["name"] == name and all(row.get(key) == params[key] for key in params)]
    assert found, f"no {name} of {params}"
    yield from found


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_worth_saving_is_saved(model: str, runner: int) -> None:
    for row in find("saved", model=model, runner=runner):
        assert row["limit"] > 6000
        assert row["ratio"] >= 0.995


@pytest.mark.parametrize("model", MODELS)
def test_what_was_saved_is_hit_when_the_engine_has_forgotten_it(model: str) -> None:
    for row in find("tokens hit", model=model, scenario="eager"):
        assert row["ideal_external"] > 90_000
        assert row["ratio"] >= 0.98
        assert row["external"] >= 0.98 * row["ideal_external"]


@pytest.mark.parametrize("model", MODELS)
def test_what_the_engine_takes_was_saved_before(model: str) -> None:
    """A full cache of the engine's own, of which each step takes 1,024 blocks of 16 tokens."""
    for row in find("saved before taken", model=model):
        assert row["limit"] > 20_000
        assert row["ratio"] >= 0.99


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left(model: str) -> None:
    for row in find("left at the end", model=model):
        assert row["value"] == 0, row


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("model", MODELS)
def test_workers_wait_for_nothing(model: str, runner: int) -> None:
    for row in find("worker's wait a step, mean", model=model, runner=runner):
        assert row["value"] == 0


@pytest.mark.parametrize(("ranks", "stages"), [(8, 2), (16, 1), (32, 4)])
def test_each_byte_is_stored_once_however_ranks_divide_a_model(ranks: int, stages: int) -> None:
    """Where two ranks have the same head, one of them stores a block and some of the first are compared."""
    for row in find("bytes stored of each", ranks=ranks, stages=stages):
        assert row["limit"] > 0
        assert row["ratio"] == 1
        assert (row["compared"] > 0) == (ranks == 16)
