"""Blocks that engines of a real server save and acquire."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.random  # loaded by numpy at its first use, when a test's process may be another user who cannot read it

from kvoffload.cache import CacheSettings
from kvoffload.protocol import (
    Acquire,
    Acquired,
    Counts,
    Credits,
    CreditsGranted,
    GroupTerms,
    Publish,
    Register,
    Stats,
)
from kvoffload.server.loop import CacheServer
from kvoffload.types import ReuseRule
from kvoffload.units import MIB
from tests.kit.server.raw_client import RawClient

RECORD_BYTES = 4096


MEMORY = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)


def register_of(name: int = 1, record_bytes: int = RECORD_BYTES) -> Register:
    return Register(
        fingerprint=bytes([name]) * 32,
        hash_algorithm="sha256",
        hash_seed=b"",
        hash_block_size=16,
        groups=(GroupTerms(record_bytes=record_bytes, block_size=16, reuse=ReuseRule.PREFIX),),
    )


def hashes_of(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(32 * count)


def chain_parents(hashes: bytes) -> bytes:
    return (bytes(32) + hashes)[: len(hashes)]


def save(client: RawClient, hashes: bytes, fill: int) -> None:
    count = len(hashes) // 32
    granted = client.ask(Credits(name_space=client.name_space, group=0, count=count))
    assert isinstance(granted, CreditsGranted)
    for address in np.frombuffer(granted.addresses, "<u8").tolist():
        client.segments.view(address, RECORD_BYTES)[:] = fill
    client.tell(
        Publish(
            name_space=client.name_space,
            group=0,
            shard=0,
            tickets=granted.tickets,
            hashes=hashes,
            parents=chain_parents(hashes),
        )
    )
    assert isinstance(client.ask(Stats()), Counts)  # the publish was served before it


def acquire(client: RawClient, hashes: bytes) -> Acquired:
    answer = client.ask(Acquire(name_space=client.name_space, chain=hashes))
    assert isinstance(answer, Acquired)
    return answer


def connect(server: CacheServer, tmp_path: Path, register: Register | None = None, engine: str = "e") -> RawClient:
    return RawClient(tmp_path / "s", register or register_of(), engine=engine, turn=lambda: server.turn(0.001))
