"""What does the connector bring and cost on a real vLLM, beside vLLM's own, and beside LMCache if it is installed?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvoffload.bench.base import Goal, Progress, Result
from kvoffload.errors import BenchmarkError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_connectors.py"
"""It needs the models of the tests, and this package knows no engine: it is a process of its own."""
END_S = 60.0
"""For a process to end its engines and servers; longer than the slowest of them takes."""
_KNOWN = ("name", "value", "unit", "limit", "ratio", "spread", "goal", "met")


class EngineBenchmark:
    """Minutes for each connector: engines run one after the other."""

    name = "engine"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """In a clone with vLLM beside it."""
        if not SCRIPT.exists():
            raise BenchmarkError(
                "the benchmarks of real engines are in kvoffload's repository, not in its wheel",
                remedy="run `make bench` in a clone",
            )
        progress("starting engines")
        with tempfile.TemporaryFile("w+") as said:
            command = [sys.executable, str(SCRIPT), "--json"]
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
                raise BenchmarkError(f"{SCRIPT.name} ended with {process.returncode}: {last}")


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, since a shell's job in the background has SIGINT ignored; it ends its engines and servers itself."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def read_result(row: dict[str, Any]) -> Result:
    """Of what `Result.as_json` wrote."""
    return Result(
        name=row["name"],
        value=row["value"],
        unit=row["unit"],
        limit=row["limit"],
        spread=row["spread"],
        goal=None if row["goal"] is None else Goal.parse(row["goal"]),
        params={name: value for name, value in row.items() if name not in _KNOWN},
    )
