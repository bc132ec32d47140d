"""How long do the slowest 1% of acquires take while `/metrics` is read ten times a second, against no reading at
all?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.parts.scraper import start_scraper
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.calls import time_acquires
from kvoffload.bench.child import Child
from kvoffload.bench.measure import summarize_pairs
from kvoffload.bench.served import join, make_chain, save_chain
from kvoffload.client import Client
from kvoffload.errors import BenchmarkError

BLOCKS = 64
CALLS = 10
ROUNDS = 15
ROUND_S = 1.0
EVERY_S = 0.1
MEMORY_MIB = 256
END_S = 10.0


class WebBenchmark:
    """A server, `kvoffload web`, a reader and a client: each a process of its own."""

    name = "web"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Microseconds of an acquire; the limit is the same without readers."""
        with tempfile.TemporaryDirectory() as folder:
            server = Path(folder, "server")
            with Child("kvoffload.bench.served", server, MEMORY_MIB, 0), join(server, "web") as client:
                chain = make_chain(BLOCKS)
                save_chain(client, chain)
                with serve_web(server) as address, start_scraper(address) as reader:
                    progress("acquires beside readers")
                    reader.ask("scrape", ROUND_S, EVERY_S)
                    busy, alone, readings = [], [], []
                    for _ in range(ROUNDS):
                        reader.start("scrape", ROUND_S, EVERY_S)
                        busy.append(_time_slowest(client, chain))
                        readings += reader.answer()
                        alone.append(_time_slowest(client, chain))
        pair = summarize_pairs(busy, alone)
        yield Result(
            name=self.name,
            value=pair.value_s * 1e6,
            unit="us",
            limit=pair.limit_s * 1e6,
            spread=pair.spread,
            goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.1),
            params={
                "what": "acquire beside readers of /metrics",
                "blocks": BLOCKS,
                "percentile": 99,
                "reading_ms": round(statistics.median(readings) * 1e3, 2),
            },
        )


def _time_slowest(client: Client, chain: bytes) -> float:
    """The 99th percentile of a round."""
    seconds: list[float] = []
    end = time.perf_counter() + ROUND_S
    while time.perf_counter() < end:
        seconds += time_acquires(client, chain, CALLS)
    return float(np.percentile(seconds, 99))


@contextmanager
def serve_web(server: Path) -> Iterator[str]:
    """Runs the web command, and yields its address. BenchmarkError: it does not start."""
    command = [sys.executable, "-P", "-m", "kvoffload", "web", "--set", f"server={server}"]
    command += ["--set", "http=tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchmarkError("kvoffload web does not start")
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
