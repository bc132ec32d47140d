"""How close do records in a Mooncake store come to what its own client moves?"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvoffload.bench.base import Progress, Result
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.bench.tier_load import BATCH_RECORDS, TIMEOUT_S, Records, get_all, put_all
from kvoffload.config.mooncake_address import MooncakeAddress
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import TierState
from kvoffload.tiers.mooncake import MooncakeSettings
from kvoffload.tiers.remote import RemoteTier
from kvoffload.units import MIB

DATA_BYTES = 32 * MIB
STORE_BYTES = 4096 * MIB
"""Nothing of what is measured is evicted: that could be what was put last."""
START_S = 30.0
SIZES = (MIB, 64 << 10)
_STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
"""
_LIMIT = """
import mmap, sys, time
from ctypes import addressof, c_char
from mooncake.store import MooncakeDistributedStore
data_bytes, batch = int(sys.argv[2]), int(sys.argv[3])
memory = mmap.mmap(-1, data_bytes)
first = addressof(c_char.from_buffer(memory))
for at in range(0, data_bytes, 4096):
    memory[at] = 1
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
print(code or store.register_buffer(first, data_bytes), flush=True)
turn, verbs = 0, {"put": store.batch_put_from, "get": store.batch_get_into}
for line in sys.stdin:
    verb, size = line.split()
    size = int(size)
    turn += verb == "put"
    begun, codes = time.perf_counter(), []
    for at in range(0, data_bytes // size, batch):
        every = range(at, min(at + batch, data_bytes // size))
        keys = [f"limit-{size}-{turn}-{number}" for number in every]
        codes += verbs[verb](keys, [first + number * size for number in every], [size] * len(every))
    seconds = time.perf_counter() - begun
    wanted = 0 if verb == "put" else size
    print(seconds if all(code == wanted for code in codes) else f"failed: {sorted(set(codes))}", flush=True)
"""


class MooncakeBenchmark:
    """Beside a master and a store that are started for it, over TCP on loopback."""

    name = "mooncake"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second."""
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(serve())
            limit = stack.enter_context(OwnClient(address))
            tier = MooncakeSettings(address=address, call_timeout_s=TIMEOUT_S).open_tier()
            stack.callback(tier.close)
            tier.wait_open(TIMEOUT_S)
            if tier.health()[0].state is not TierState.READY:
                raise BenchmarkError(f"there is no tier: {tier.health()[0].reason}")
            memory = np.random.default_rng(3).integers(0, 256, DATA_BYTES, np.uint8)
            for size_bytes in SIZES:
                records = Records(size_bytes, DATA_BYTES // size_bytes, memory)
                for verb in ("put", "get"):
                    progress(f"{verb} of {size_bytes >> 10} KiB")
                    yield self._row(limit, tier, records, verb)

    def _row(self, limit: OwnClient, tier: RemoteTier, records: Records, verb: str) -> Result:
        order = np.arange(records.count)

        def move() -> float:
            put_s = put_all(tier, records)
            return put_s if verb == "put" else get_all(tier, records, order)

        def move_own() -> float:
            put_s = limit.move("put", records.record_bytes)
            return put_s if verb == "put" else limit.move("get", records.record_bytes)

        pair = measure_timed_pair(move, move_own)
        return Result(
            name=self.name,
            value=DATA_BYTES / pair.value_s,
            unit="B/s",
            limit=DATA_BYTES / pair.limit_s,
            spread=pair.spread,
            goal=None,
            params={"what": verb, "record_bytes": records.record_bytes},
        )


class OwnClient:
    """Mooncake's own, in a process of its own, with its memory registered: batches of as many as the tier's."""

    def __init__(self, address: MooncakeAddress) -> None:
        self._process = _start(_LIMIT, address.endpoint, str(DATA_BYTES), str(BATCH_RECORDS))

    def move(self, verb: str, size_bytes: int) -> float:
        """Returns the seconds for DATA_BYTES; what is got is what was put last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{verb} {size_bytes}\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline().strip()
        try:
            return float(told)
        except ValueError:
            raise BenchmarkError(f"Mooncake's own client: {told or 'it has ended'}") from None

    def __enter__(self) -> OwnClient:
        return self

    def __exit__(self, *fault: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def serve() -> Iterator[MooncakeAddress]:
    """A master and a store, until it is left."""
    own = Path(sys.executable).with_name("mooncake_master")
    program = str(own) if own.exists() else shutil.which("mooncake_master")
    if program is None:
        raise BenchmarkError("mooncake_master is not installed", remedy="pip install mooncake-transfer-engine-non-cuda")
    port, metrics = _free_port(), _free_port()
    command = [program, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    master = subprocess.Popen(
        [*_LIBRARIES, *command, f"--metrics_port={metrics}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    store: subprocess.Popen[str] | None = None
    try:
        end_s = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if master.poll() is not None or time.monotonic() > end_s:
                raise BenchmarkError("mooncake_master does not start")
            time.sleep(0.02)
        address = MooncakeAddress(host="127.0.0.1", port=port)
        store = _start(_STORE, address.endpoint, str(STORE_BYTES))
        yield address
    finally:
        for process in (store, master):
            if process is not None:
                process.kill()
                process.communicate()


_LIBRARIES = ["env", f"LD_LIBRARY_PATH={Path(sys.prefix) / 'debian/usr/lib' / f'{os.uname().machine}-linux-gnu'}"]
"""Where they are if this machine has none of its own."""


def _start(program: str, *words: str) -> subprocess.Popen[str]:
    """A process that says 0 when it is ready."""
    process = subprocess.Popen(
        [*_LIBRARIES, sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    told = process.stdout.readline().strip()
    if told != "0":
        process.kill()
        process.communicate()
        raise BenchmarkError(f"Mooncake's client does not start: {told or 'it has ended'}")
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
