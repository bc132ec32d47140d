"""`kvoffload bench`: one JSON object a line, or a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvoffload.bench import explain
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.cli import bench as bench_cli
from kvoffload.cli.app import make_app
from kvoffload.errors import BenchmarkError, ConfigError
from kvoffload.transfer.calibration import Calibration, CalibrationKey
from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import CopyWay, WayTiming

app = make_app()


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


def test_a_page_where_one_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["bench", "toy", "--report", str(file)])
    assert done.exit_code == 0
    assert "Does the printer print?" in file.read_text()
    assert "0.500" in done.stdout, "and the table all the same"
    done = CliRunner().invoke(app, ["bench", "toy", "--json", "--report", str(tmp_path / "no" / "folder")])
    assert done.stdout == "", "it is said before anything is measured"
    assert isinstance(done.exception, ConfigError)
    assert "No such file" in str(done.exception)


def test_what_could_not_run_is_a_fault() -> None:
    done = CliRunner().invoke(app, ["bench", "broken"])
    assert isinstance(done.exception, BenchmarkError)


def test_what_cannot_run_here_keeps_nothing_else_from_being_measured() -> None:
    done = CliRunner().invoke(app, ["bench", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["name"] == "toy"
    assert "broken was not measured: no disk here" in done.stderr


def test_the_ways_of_copying_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = tuple(
        WayTiming(direction=CopyDirection.SAVE, run_bytes=4096, runs=1000, way=way, seconds=seconds)
        for way, seconds in ((CopyWay.BATCH, 1e-3), (CopyWay.STAGED, 1e-4))
    )
    key = CalibrationKey(gpu="GPU 7", driver="13.0", kernels=(), page_bytes=(4096,))
    monkeypatch.setattr(explain, "find_gpu_calibration", lambda: Calibration(key=key, timings=timings))
    done = CliRunner().invoke(app, ["bench", "copy", "--explain"])
    assert done.exit_code == 0
    for shown in ("GPU 7", "staged", "40.96", "4.096"):
        assert shown in done.stdout
    lines = CliRunner().invoke(app, ["bench", "copy", "--explain", "--json"]).stdout.splitlines()
    assert [json.loads(line)["way"] for line in lines] == ["staged"]


@pytest.mark.parametrize("names", [[], ["digest"], ["copy", "digest"]])
def test_only_copies_have_ways(names: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *names, "--explain"])
    assert isinstance(done.exception, ConfigError)
    assert "kvoffload bench copy --explain" in str(done.exception)
