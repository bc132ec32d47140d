"""Runs the benchmarks that a GPU or its machine decides, into benchmarks/results/<gpu>.json: a JSON object a line."""

from __future__ import annotations

import datetime
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from kvoffload import __version__, native
from kvoffload.bench.base import Result
from kvoffload.bench.copy import CopyBenchmark
from kvoffload.bench.digest import DigestBenchmark


def measure() -> Iterator[Result]:
    """Measures copies and digests, and a model of real size where vLLM's build for CUDA is."""
    for benchmark in (CopyBenchmark(), DigestBenchmark()):
        yield from benchmark.run(_say)
    if any(found.name == "vllm" for found in distributions()):
        from benchmarks.connectors.real_size import measure_real_size

        with tempfile.TemporaryDirectory() as models:
            yield from measure_real_size(Path(models), _say)


def _say(step: str) -> None:
    print(f"gpu: {step}", file=sys.stderr)


def main(folder: Path) -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu: torch sees no CUDA device, nothing is written", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name(0)
    machine = {
        "name": "machine",
        "gpu": gpu,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kvoffload": __version__,
        "capabilities": str(native.capabilities(probe_devices=True)),
    }
    target = folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")
    so_far = target.with_suffix(".partial")
    with so_far.open("w", buffering=1) as file:
        print(json.dumps(machine), file=file)
        for result in measure():
            print(json.dumps(result.as_json()), file=file)
    so_far.replace(target)
    print(target.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
