"""Does the connector keep up at real models' sizes, with vLLM's own scheduler and GPUs that are not there?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvoffload.bench.base import Progress, Result
from kvoffload.bench.clone_script import FOLDER, run_script

SCRIPT = FOLDER / "scale.py"


@dataclass(frozen=True)
class ScaleBenchmark:
    """An hour for all models, less than a minute for the two of the short form. `trace`: conversations."""

    is_short: bool = False
    trace: Path | None = None
    name = "scale"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """In a clone with vLLM beside it."""
        progress("starting an engine")
        short = ["--short"] if self.is_short else []
        trace = [] if self.trace is None else ["--trace", str(self.trace)]
        yield from run_script(SCRIPT, *short, *trace, progress=progress)
