"""Benchmarks that live in a clone: programs in `benchmarks/`, each a process of its own, whose lines are results.

This package knows no engine; they may.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.bench.base import Goal, Progress, Result
from kvoffload.errors import BenchmarkError

FOLDER = Path(__file__).parents[2] / "benchmarks"
END_S = 60.0
"""For a process to end its engines and servers; longer than the slowest of them takes."""
CONNECTORS = FOLDER / "vllm_connectors.py"
"""It needs the models of the tests."""
SCALE = FOLDER / "scale.py"
_KNOWN = ("name", "value", "unit", "limit", "ratio", "spread", "goal", "met")


class EngineBenchmark:
    """Minutes for each connector: engines run one after the other."""

    name = "engine"
    question = (
        "What does the connector bring and cost on a real vLLM, beside vLLM's own, "
        "and beside LMCache if it is installed?"
    )

    def run(self, progress: Progress) -> Iterator[Result]:
        """In a clone with vLLM beside it."""
        progress("starting engines")
        yield from run_script(CONNECTORS, progress=progress)


@dataclass(frozen=True)
class ScaleBenchmark:
    """An hour for all models, less than a minute for the two of the short form. `trace`: conversations."""

    is_short: bool = False
    trace: Path | None = None
    name = "scale"
    question = (
        "Does the connector keep up at real models' sizes, with vLLM's own scheduler and GPUs that are not there?"
    )

    def run(self, progress: Progress) -> Iterator[Result]:
        """In a clone with vLLM beside it."""
        progress("starting an engine")
        short = ["--short"] if self.is_short else []
        trace = [] if self.trace is None else ["--trace", str(self.trace)]
        yield from run_script(SCALE, *short, *trace, progress=progress)


def run_script(script: Path, *arguments: str, progress: Progress) -> Iterator[Result]:
    """Its results as they come. Whoever wants no more ends it. BenchmarkError: there is no clone, or it failed."""
    if not script.exists():
        raise BenchmarkError(
            f"{script.name} is in kvoffload's repository, not in its wheel", remedy="run `make bench` in a clone"
        )
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, str(script), "--json", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    result = read_result(json.loads(line))
                    progress(" ".join(map(str, (result.name, *result.params.values()))))
                    yield result
            except BaseException:
                _end(process)
                raise
        if process.returncode:
            said.seek(0)
            last = " ".join(said.read().strip().splitlines()[-1:])
            raise BenchmarkError(f"{script.name} ended with {process.returncode}: {last}")


def read_result(row: dict[str, Any]) -> Result:
    """Reads what `Result.as_json` wrote."""
    return Result(
        name=row["name"],
        value=row["value"],
        unit=row["unit"],
        limit=row["limit"],
        spread=row["spread"],
        goal=None if row["goal"] is None else Goal.parse(row["goal"]),
        params={name: value for name, value in row.items() if name not in _KNOWN},
    )


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, since a shell's job in the background has SIGINT ignored; it ends its engines and servers itself."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
