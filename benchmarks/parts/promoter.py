"""A load of requests that wait for the disk, a fixed number at once, while a benchmark measures something else."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from kvoffload.bench.child import Child, say_ready
from kvoffload.bench.served import JOIN_S, PATIENT, make_chain, make_register
from kvoffload.cache import Ask
from kvoffload.client import AsyncClient, ClientSettings, Member, TierWait
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
    asyncio.run(_promote(Path(path), int(chains)))


async def _promote(path: Path, chains: int) -> None:
    member = Member(engine="promoter", role=Role.WORKER, pid=os.getpid(), uid=os.getuid())
    settings = ClientSettings(socket=path, member=member, register=make_register(HIT_RECORD_BYTES), link=PATIENT)
    async with AsyncClient(settings) as client:
        if not await client.wait_until_served(JOIN_S):
            raise BenchmarkError(f"the server does not serve: {client.fault}")
        say_ready()
        await asyncio.gather(*(_wait_for(client, chains, random.Random(number)) for number in range(PROMOTIONS)))


async def _wait_for(client: AsyncClient, chains: int, choice: random.Random) -> None:
    while True:
        found = await client.acquire(Ask(make_chain(HIT_BLOCKS, 1000 + choice.randrange(chains))), far=FAR)
        if found.lease is not None:
            client.release(found.lease)
        await asyncio.sleep(0)
