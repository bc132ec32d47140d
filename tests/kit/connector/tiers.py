"""Shared parts of the tests of the secondary tier: a CPU tier of random rows, and a real server that keeps them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule
from kvoffload.client import Client, ClientSettings, LinkSettings, Member, describe_blocks
from kvoffload.connector.secondary.transfers import ROWS, EndedJob, TierTransfers, TransferSettings, map_rows
from kvoffload.kvspec import ReuseRule
from kvoffload.native import sha256
from kvoffload.protocol import Role
from kvoffload.transfer.host_engine import HostEngine
from tests.kit.cache.cache_model import fingerprint

if TYPE_CHECKING:
    from kvoffload.protocol import Register

T = TypeVar("T")

ROW_BYTES = 4096
ROW_COUNT = 64
TOKENS = 16
WAIT_S = 30.0
PATIENCE_S = 20.0


def names_of(*chunks: object) -> list[bytes]:
    return [sha256(repr(chunk).encode()) for chunk in chunks]


def wait_for(find: Callable[[], T | None]) -> T:
    """Waits for what other threads and processes bring about."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = find()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError(f"not within {WAIT_S:.0f} s")


def register_of(identity: str, *, row_bytes: int = ROW_BYTES) -> Register:
    rule = GroupRule(block_size=TOKENS, reuse=ReuseRule.PREFIX)
    geometry = CacheGeometry(hash_block_size=TOKENS, groups=(CacheGroup(rule=rule, record_bytes=row_bytes),))
    return describe_blocks(fingerprint(identity), geometry, hash_algorithm="sha256")


@dataclass
class SmallTier:
    """One engine's tier: its client, its rows, and their transfers."""

    client: Client
    rows: npt.NDArray[np.uint8]
    transfers: TierTransfers
    number: int = 0

    def store(self, names: list[bytes], rows: list[int]) -> EndedJob:
        self.number += 1
        self.transfers.store(self.number, names, rows)
        ended = self.await_end(self.number)
        if self.client.is_served:
            self.client.stats()  # it has heard of all of them
        return ended

    def load(self, names: list[bytes], rows: list[int]) -> EndedJob:
        self.number += 1
        self.transfers.load(self.number, names, rows)
        return self.await_end(self.number)

    def await_end(self, job: int) -> EndedJob:
        (ended,) = wait_for(self.transfers.poll)
        assert ended.job == job
        return ended

    def close(self) -> None:
        self.transfers.close()
        self.client.close()


def open_tier(
    socket: Path,
    identity: str,
    *,
    stock: int = 8,
    verify_always: bool = False,
    promote_wait_s: float = 0.0,
    row_bytes: int = ROW_BYTES,
) -> SmallTier:
    """Served, with slots that are held ready."""
    settings = ClientSettings(
        socket=socket,
        member=Member(engine=f"engine of {identity}", role=Role.SCHEDULER, rank=0, pid=os.getpid(), uid=os.getuid()),
        register=register_of(identity, row_bytes=row_bytes),
        link=LinkSettings(acquire_deadline_s=PATIENCE_S, call_deadline_s=PATIENCE_S, stock_slots=(stock,)),
    )
    client = Client(settings).start()
    assert client.wait_until_served(WAIT_S), client.fault
    wait_for(lambda: client.ready_slots()[0])
    rows = np.random.default_rng(7).integers(0, 256, (ROW_COUNT, row_bytes), np.uint8)
    engine = HostEngine(map_rows(rows=ROW_COUNT, row_bytes=row_bytes), {ROWS: rows.ctypes.data}, threads=1)
    transfers = TierTransfers(
        client,
        engine,
        TransferSettings(
            fingerprint=bytes(fingerprint(identity)),
            record_bytes=row_bytes,
            block_tokens=TOKENS,
            verify_always=verify_always,
            promote_wait_s=promote_wait_s,
        ),
    )
    return SmallTier(client, rows, transfers)
