"""What a program of a clone prints is a result; what it cannot do is a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.bench import clone_script
from kvoffload.bench.base import Result
from kvoffload.bench.clone_script import EngineBenchmark, ScaleBenchmark, read_result, run_script
from kvoffload.errors import BenchmarkError
from tests.kit.bench.scripts import RESULT


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def ignore(step: str) -> None:
    """Ignores what is told: nobody looks on."""


def test_a_result_is_read_as_it_was() -> None:
    without = Result(name="x", value=1.0, unit="s", limit=1.0, spread=0.0, goal=None, params={})
    for result in (RESULT, without):
        assert read_result(json.loads(json.dumps(result.as_json()))) == result


def test_lines_are_results(script: Path) -> None:
    script.write_text(f"print({json.dumps(RESULT.as_json())!r})\nprint({json.dumps(RESULT.as_json())!r})\n")
    steps: list[str] = []
    assert list(run_script(script, progress=steps.append)) == [RESULT, RESULT]
    assert steps[-1] == "ttft kvoffload 4096"


def test_whoever_wants_no_more_ends_it(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "try:\n"
        f"    print({json.dumps(RESULT.as_json())!r}, flush=True)\n"
        "    time.sleep(600)\n"
        f"finally:\n    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    running = run_script(script, progress=ignore)
    assert next(running) == RESULT
    running.close()  # type: ignore[attr-defined]
    assert (tmp_path / "ended").exists()


def test_one_that_does_not_end_is_killed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone_script, "END_S", 0.1)
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"print({json.dumps(RESULT.as_json())!r}, flush=True)\n"
        "time.sleep(600)\n"
    )
    running = run_script(script, progress=ignore)
    assert next(running) == RESULT
    running.close()  # type: ignore[attr-defined]


def test_it_is_given_its_arguments(script: Path) -> None:
    row = RESULT.as_json()
    script.write_text(f"import json, sys\nprint(json.dumps({{**{row!r}, 'connector': ' '.join(sys.argv[1:])}}))\n")
    (result,) = run_script(script, "--short", progress=ignore)
    assert result.params["connector"] == "--json --short"


def test_what_went_wrong_is_a_line(script: Path) -> None:
    script.write_text("import sys\nprint('no such model', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(BenchmarkError, match=r"script\.py ended with 3: no such model"):
        list(run_script(script, progress=ignore))


def test_a_wheel_says_where_it_is(script: Path) -> None:
    with pytest.raises(BenchmarkError, match="not in its wheel; run `make bench` in a clone"):
        list(run_script(script, progress=ignore))


# ---- the benchmarks that are such programs ----


def test_the_repository_has_the_benchmark_of_real_engines() -> None:
    assert clone_script.CONNECTORS.exists()


def test_lines_of_the_benchmark_of_real_engines_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone_script, "CONNECTORS", tmp_path / "script.py")
    clone_script.CONNECTORS.write_text(f"import json\nprint(json.dumps({RESULT.as_json()!r}))\n")
    steps: list[str] = []
    assert list(EngineBenchmark().run(steps.append)) == [RESULT]
    assert steps == ["starting engines", "ttft kvoffload 4096"]


def test_the_repository_has_the_proving_ground() -> None:
    assert clone_script.SCALE.exists()


@pytest.mark.parametrize(
    ("benchmark", "told"),
    [
        (ScaleBenchmark(), "--json"),
        (ScaleBenchmark(is_short=True), "--json --short"),
        (ScaleBenchmark(trace=Path("t.jsonl")), "--json --trace t.jsonl"),
    ],
)
def test_the_proving_ground_is_told_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: ScaleBenchmark, told: str
) -> None:
    monkeypatch.setattr(clone_script, "SCALE", tmp_path / "script.py")
    row = RESULT.as_json()
    clone_script.SCALE.write_text(
        f"import json, sys\nprint(json.dumps({{**{row!r}, 'connector': ' '.join(sys.argv[1:])}}))\n"
    )
    (result,) = benchmark.run(lambda step: None)
    assert result.params["connector"] == told
