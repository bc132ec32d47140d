"""`kvoffload bench`: one JSON object a line, or a table."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.cli import bench as bench_cli
from kvoffload.cli.app import app
from kvoffload.errors import BenchmarkError


class ToyBenchmark:
    name = "toy"
    question = "Does the printer print?"

    def run(self, progress: Progress) -> Iterator[Result]:
        progress("half way")
        goal = Goal(Measure.RATIO, Bound.AT_LEAST, 0.9)
        yield Result(name="toy", value=1.0, unit="B/s", limit=2.0, spread=0.1, goal=goal, params={"size": 3})


class BrokenBenchmark(ToyBenchmark):
    name = "broken"

    def run(self, progress: Progress) -> Iterator[Result]:
        raise BenchmarkError("no disk here")


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "BENCHMARKS", (ToyBenchmark(), BrokenBenchmark()))


def test_json_lines() -> None:
    done = CliRunner().invoke(app, ["bench", "toy", "--json"])
    assert done.exit_code == 0
    line = json.loads(done.stdout)
    assert (line["name"], line["ratio"], line["met"], line["size"]) == ("toy", 0.5, False, 3)


def test_a_table_otherwise() -> None:
    done = CliRunner().invoke(app, ["bench", "toy"])
    assert done.exit_code == 0
    assert "size=3" in done.stdout
    assert "0.500" in done.stdout


def test_what_could_not_run_is_a_fault() -> None:
    done = CliRunner().invoke(app, ["bench", "broken"])
    assert isinstance(done.exception, BenchmarkError)
