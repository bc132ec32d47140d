"""How long after a server's start the first block is saved and hit: in this machine's time, without an engine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ground.server import run_server
from kvoffload.bench.base import Bound, Goal, Measure, Result
from kvoffload.bench.served import acquire, join, make_chain, save_chain
from kvoffload.units import GIB

POOL_BYTES = 512 * GIB
RECORD_BYTES = 2 << 20
"""A block's of Llama-3.1-8B."""
BLOCKS = 64
TURNS = 5


def start_server() -> Iterator[Result]:
    """Beside it, in turn: the same command that says its options and ends."""
    starts, bare = [], []
    with tempfile.TemporaryDirectory() as name, _compiling_once(Path(name)):
        _time_first_hit(make_chain(BLOCKS, seed=TURNS))
        for turn in range(TURNS):
            bare.append(_time_command())
            starts.append(_time_first_hit(make_chain(BLOCKS, seed=turn)))
    ratios = sorted(start / alone for start, alone in zip(starts, bare, strict=True))
    yield Result(
        name="server's start to the first hit",
        value=statistics.median(starts) * 1e3,
        limit=statistics.median(bare) * 1e3,
        unit="ms",
        spread=(ratios[-2] - ratios[1]) / statistics.median(ratios),
        goal=Goal(Measure.VALUE, Bound.AT_MOST, 1000.0),
        params={"scenario": "start", "pool_gib": POOL_BYTES // GIB, "least_ms": round(min(starts) * 1e3, 1)},
    )


@contextmanager
def _compiling_once(folder: Path) -> Iterator[None]:
    """Python's modules are compiled by the first process only, as where a package was installed."""
    former = {name: os.environ.pop(name, None) for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    try:
        yield
    finally:
        del os.environ["PYTHONPYCACHEPREFIX"]
        os.environ.update({name: value for name, value in former.items() if value is not None})


def _time_first_hit(chain: bytes) -> float:
    begun_s = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as name,
        run_server(Path(name), memory=str(POOL_BYTES)) as socket,
        join(socket, "first", record_bytes=RECORD_BYTES) as client,
    ):
        save_chain(client, chain)
        client.release(acquire(client, chain).lease)
        return time.perf_counter() - begun_s


def _time_command() -> float:
    begun_s = time.perf_counter()
    command = [sys.executable, "-P", "-m", "kvoffload", "serve", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun_s
