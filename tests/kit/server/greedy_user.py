"""A process of another user holds all it gets. `python -m tests.kit.server.greedy_user SOCKET UID ACT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvoffload.protocol import Credits, CreditsGranted
from kvoffload.protocol.limits import MAX_BATCH
from kvoffload.types import AcquireOutcome
from tests.kit.server.blocks import MEMORY, RECORD_BYTES, acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

SLOTS = MEMORY.memory_bytes // RECORD_BYTES
"""Slots of a server's memory."""
TOGETHER = 512
"""Blocks of one save or lease."""


def reserve_all(client: RawClient) -> int:
    """Takes slots until it gets no more; returns how many it has."""
    held = 0
    while True:
        granted = client.ask(Credits(name_space=client.name_space, group=0, count=MAX_BATCH))
        assert isinstance(granted, CreditsGranted)
        if not granted.tickets:
            return held
        held += len(granted.tickets) // 8


def lease_all(client: RawClient) -> None:
    """Fills the pool, and leases its blocks until it gets no more."""
    saved = [hashes_of(TOGETHER, seed) for seed in range(SLOTS // TOGETHER)]
    for hashes in saved:
        save(client, hashes, 7)
    for hashes in saved:
        if acquire(client, hashes).outcome is not AcquireOutcome.HIT:
            return


def lease_often(client: RawClient) -> None:
    """Leases one block until it gets no more leases."""
    save(client, hashes_of(1, 1), 7)
    while acquire(client, hashes_of(1, 1)).outcome is AcquireOutcome.HIT:
        pass


ACTS = {"reserve_all": reserve_all, "lease_all": lease_all, "lease_often": lease_often}


def main() -> None:
    path, user, act = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    client = RawClient(Path(path), register_of(), engine="greedy")
    ACTS[act](client)
    print("holds what it gets", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
