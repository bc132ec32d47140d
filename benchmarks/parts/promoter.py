"""A load of requests that wait for the disk, a fixed number at once, while a benchmark measures something else."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvoffload.bench.child import Child, say_ready
from kvoffload.bench.served import JOIN_S, PATIENT, make_chain, make_register
from kvoffload.cache import Ask
from kvoffload.client import Client, ClientSettings, Member, TierWait
from kvoffload.errors import BenchmarkError
from kvoffload.protocol import Role

ROOT = Path(__file__).resolve().parents[2]
FAR = TierWait(wait_s=5.0)
HIT_BLOCKS = 64
HIT_RECORD_BYTES = 64 << 10
PROMOTIONS = 8
"""Number of requests that wait at once."""


def start_promoter(path: Path, chains: int) -> Child:
    """Starts the process, which finds this module in the clone."""
    return Child(__name__, path, chains, enter=("env", f"PYTHONPATH={ROOT}"))


def main(path: str, chains: str) -> None:
    """Promotes records until SIGTERM comes."""
    member = Member(engine="promoter", role=Role.WORKER, pid=os.getpid(), uid=os.getuid())
    settings = ClientSettings(socket=Path(path), member=member, register=make_register(HIT_RECORD_BYTES), link=PATIENT)
    with Client(settings) as client:
        if not client.wait_until_served(JOIN_S):
            raise BenchmarkError(f"the server does not serve: {client.fault}")
        say_ready()
        with ThreadPoolExecutor(PROMOTIONS) as pool:
            list(pool.map(lambda number: _promote(client, int(chains), random.Random(number)), range(PROMOTIONS)))


def _promote(client: Client, chains: int, choice: random.Random) -> None:
    while True:
        found = client.acquire(Ask(make_chain(HIT_BLOCKS, 1000 + choice.randrange(chains))), far=FAR)
        if found.lease is not None:
            client.release(found.lease)
