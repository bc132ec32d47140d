"""A cache server in a process of its own, and clients of it that find what they ask for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvoffload.bench.child import say_ready
from kvoffload.cache import AcquiredBlocks, Ask, CacheSettings, Publication
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.client import Client, ClientSettings, LinkSettings, Member
from kvoffload.errors import BenchmarkError
from kvoffload.protocol import GroupTerms, Register, Role
from kvoffload.protocol.limits import MAX_BATCH
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.tiering.settings import TierPlan, TierSettings
from kvoffload.tiers.disk import DiskFolder, DiskSettings
from kvoffload.types import HASH_BYTES, ReuseRule
from kvoffload.units import MIB

BLOCK_TOKENS = 16
JOIN_S = 120.0
PATIENT = LinkSettings(acquire_deadline_s=10.0, call_deadline_s=60.0)
"""Waits for what is slow, so that it is measured."""


@contextmanager
def join(path: Path | str, engine: str, *, record_bytes: int = 64, link: LinkSettings = PATIENT) -> Iterator[Client]:
    """Joins the server as a client of the one identity that all have. BenchmarkError: it is not served."""
    register = make_register(record_bytes)
    member = Member(engine=engine, role=Role.WORKER, pid=os.getpid(), uid=os.getuid())
    with Client(ClientSettings(socket=Path(path), member=member, register=register, link=link)) as client:
        if not client.wait_until_served(JOIN_S):
            raise BenchmarkError(f"the server does not serve: {client.fault}")
        yield client


def make_register(record_bytes: int) -> Register:
    """Of the one identity that all have, with one group."""
    return Register(
        fingerprint=bytes(HASH_BYTES),
        hash_algorithm="sha256",
        hash_seed=b"",
        hash_block_size=BLOCK_TOKENS,
        groups=(GroupTerms(record_bytes=record_bytes, block_size=BLOCK_TOKENS, reuse=ReuseRule.PREFIX),),
    )


def make_chain(blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(HASH_BYTES * blocks)


def save_chain(client: Client, chain: bytes) -> None:
    """Saves a chain with the slots' present content; from here on it is a hit. BenchmarkError: it is not."""
    parents = bytes(HASH_BYTES) + chain
    for first in range(0, len(chain), MAX_BATCH * HASH_BYTES):
        hashes = chain[first : first + MAX_BATCH * HASH_BYTES]
        slots = client.reserve(0, count=len(hashes) // HASH_BYTES)
        client.publish(Publication(slots, hashes=hashes, parents=parents[first : first + len(hashes)]))
    client.stats()
    if not client.lookup(0, chain).all():
        raise BenchmarkError(f"of {len(chain) // HASH_BYTES} blocks not all were saved")


def acquire(client: Client, chain: bytes) -> AcquiredBlocks:
    """Acquires blocks. BenchmarkError: it is no hit, or not of all."""
    found = client.acquire(Ask(chain))
    if not found.is_hit or found.boundary != len(chain) // HASH_BYTES * BLOCK_TOKENS:
        raise BenchmarkError(f"an acquire of what was saved is a {found.outcome.name} up to {found.boundary}")
    return found


def main(path: str, memory_mib: str, adopt_wait_s: str, policy: str = DEFAULT_POLICY, *disk: str) -> None:
    """The server, until SIGTERM. `disk`: a folder and its MiB, for one below memory."""
    size = int(memory_mib) * MIB
    memory = CacheSettings(memory_bytes=size, segment_bytes=size, policy=policy)
    tiers = {}
    if disk:
        folder = DiskFolder(path=Path(disk[0]), capacity_bytes=int(disk[1]) * MIB)
        settings = DiskSettings(folders=[folder], segment_bytes=64 * MIB, record_limit_bytes=4 * MIB)
        tiers[""] = [TierPlan(place=settings, settings=TierSettings())]
    plan = ServerPlan(socket=Path(path), memory={"": memory}, adopt_wait_s=float(adopt_wait_s), tiers=tiers)
    server = CacheServer(plan)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    say_ready()
    try:
        server.run()
    finally:
        server.close()
