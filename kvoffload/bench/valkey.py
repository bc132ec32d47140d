"""How close do records in a Valkey server come to what its own benchmark moves?"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.far_store import FarStore, Load
from kvoffload.bench.tier_load import TIMEOUT_S
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.units import MIB

DATA_BYTES = 128 * MIB
SERVER_ROUNDS = 3
"""So many times DATA_BYTES is the server's memory, and what it needs besides."""
SERVER_BYTES = 32 * MIB
LIMIT_CLIENTS = (1, 2, 4)
"""Connections of the server's own benchmark: the best of them is the limit."""
START_S = 10.0
LOADS = (
    Load(record_bytes=MIB, value_bytes=MIB, goal=Goal(Measure.RATIO, Bound.AT_LEAST, 0.7)),
    Load(record_bytes=64 << 10, value_bytes=64 << 10, goal=None),
)
_VERBS = {"put": "set", "get": "get"}


@dataclass(frozen=True)
class OwnServer:
    """One of this benchmark, on loopback, that writes nothing to disk."""

    port: int

    def time_limit(self, verb: str, value_bytes: int, clients: int) -> float:
        """Seconds in which its own benchmark moves DATA_BYTES."""
        calls = DATA_BYTES // value_bytes
        command = [*find_command("redis-benchmark"), "-p", str(self.port), "-d", str(value_bytes), "-n", str(calls)]
        command += ["-c", str(clients), "-t", _VERBS[verb], "--csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        rows = list(csv.DictReader(done.stdout.splitlines()))
        if done.returncode or not rows:
            raise BenchmarkError(f"redis-benchmark failed: {done.stderr.strip() or 'no figures'}")
        return calls / float(rows[0]["rps"])

    def flush(self) -> None:
        """Removes all that is there."""
        subprocess.run([*find_command("redis-cli"), "-p", str(self.port), "flushall"], capture_output=True, check=True)


class ValkeyBenchmark:
    """Measures against a server that it starts: `redis-server` must be installed."""

    name = "valkey"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second."""
        with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as folder, serve(Path(folder)) as server:
            address = ValkeyAddress(host="127.0.0.1", port=server.port)
            tier = ValkeySettings(address=address, call_timeout_s=TIMEOUT_S).open_tier()
            # Puts go to a server that is full and evicts, as one in use does. A new server takes its memory from the
            # kernel first, which its own benchmark never does, as it writes one value again and again.
            store = FarStore(
                name=self.name, data_bytes=DATA_BYTES, clients=LIMIT_CLIENTS, rounds_before_puts=SERVER_ROUNDS + 1
            )
            yield from store.measure(tier, server, LOADS, progress)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[OwnServer]:
    """Runs the server until the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        *find_command("redis-server"),
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(folder),
        "--save",
        "",
    ]
    memory_bytes = SERVER_ROUNDS * DATA_BYTES + SERVER_BYTES
    command += ["--maxmemory", str(memory_bytes), "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > end_s:
                raise BenchmarkError("redis-server does not start")
            time.sleep(0.01)
        yield OwnServer(port)
    finally:
        process.kill()
        process.wait()


def _find(program: str) -> str:
    own = Path(sys.prefix) / "debian/usr/bin" / program
    found = str(own) if own.exists() else shutil.which(program)
    if found is None:
        raise BenchmarkError(f"{program} is not installed", remedy="install redis-server, or run `make setup`")
    return found


def find_command(program: str) -> list[str]:
    """Returns the command of a program, with the path of the libraries that were installed with it."""
    libraries = Path(sys.prefix) / "debian/usr/lib" / f"{os.uname().machine}-linux-gnu"
    return ["env", f"LD_LIBRARY_PATH={libraries}", _find(program)]
