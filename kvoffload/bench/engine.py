"""What does the connector bring and cost on a real vLLM, beside vLLM's own, and beside LMCache if it is installed?"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.bench.base import Progress, Result
from kvoffload.bench.clone_script import FOLDER, run_script

SCRIPT = FOLDER / "vllm_connectors.py"
"""It needs the models of the tests."""


class EngineBenchmark:
    """Minutes for each connector: engines run one after the other."""

    name = "engine"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """In a clone with vLLM beside it."""
        progress("starting engines")
        yield from run_script(SCRIPT, progress=progress)
