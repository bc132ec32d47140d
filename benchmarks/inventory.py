"""How long does a router take to learn what a full pool has, and how long is the server's loop held for it?

A server in a process of its own has so many blocks; a client subscribes and takes the inventory. The limit is one copy
of what is told: 72 bytes a block.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule, LocalCache
from kvoffload.client import (
    Client,
    ClientSettings,
    Heard,
    InventoryBegun,
    InventoryEnded,
    LinkSettings,
    Member,
    describe_blocks,
)
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Role, Stored
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.types import HASH_BYTES, Fingerprint
from kvoffload.units import MIB

BLOCKS = 1 << 20
RECORD_BYTES = 512
BATCH = 1 << 14
PROMPT_BLOCKS = 512
GEOMETRY = CacheGeometry(
    hash_block_size=16,
    groups=(CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=RECORD_BYTES),),
)
FINGERPRINT = Fingerprint(b"inventory".ljust(HASH_BYTES, b"\0"))


def fill(cache: LocalCache, blocks: int) -> None:
    """Stores prompts of `PROMPT_BLOCKS` each."""
    name_space, session = cache.open_namespace(FINGERPRINT, GEOMETRY), cache.open_session()
    random = np.random.default_rng(0)
    for first in range(0, blocks, BATCH):
        count = min(BATCH, blocks - first)
        rows = random.integers(0, 256, (count, HASH_BYTES), np.uint8)
        parents = np.roll(rows, 1, axis=0)
        parents[::PROMPT_BLOCKS] = 0
        reserved = cache.reserve(session, name_space, 0, count=count)
        digests = np.ones(count, np.uint64)
        names, before = rows.tobytes(), parents.tobytes()
        cache.commit(session, name_space, 0, reserved.tickets, hashes=names, parents=before, digests=digests)


def serve(path: Path, blocks: int) -> None:
    """Serves until it is told to end, and prints what the longest turn took of the processor, in seconds."""
    memory = CacheSettings(
        memory_bytes=max(2 * blocks * RECORD_BYTES, 64 * MIB), segment_bytes=64 * MIB, extent_bytes=MIB, is_sparse=True
    )
    server = CacheServer(ServerPlan(socket=path, memory={"": memory}))
    while not server.has_memory:
        server.turn(0.01)
    fill(next(iter(server.pools.caches.values())), blocks)
    print("serves", flush=True)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    longest_s = 0.0
    while not is_over.is_set():
        begin_s = time.thread_time()
        # It waits for nothing, so that what a turn takes of the processor is what it holds others up.
        server.turn(0)
        longest_s = max(longest_s, time.thread_time() - begin_s)
        if longest_s and not server.core.feed.ready():
            time.sleep(0.0001)
    print(longest_s, flush=True)
    server.stop()
    server.close()


def take(path: Path, blocks: int) -> float:
    """Subscribes, and returns how many seconds the inventory took."""
    told, begun_s, ended = [0], [0.0], threading.Event()

    def hear(event: Heard, number: int) -> None:
        if isinstance(event, InventoryBegun):
            begun_s[0] = time.perf_counter()
        elif isinstance(event, Stored):
            told[0] += len(event.hashes) // HASH_BYTES
        elif isinstance(event, InventoryEnded):
            begun_s[0] = time.perf_counter() - begun_s[0]
            ended.set()

    member = Member(engine="router", role=Role.SCHEDULER, pid=os.getpid())
    register = describe_blocks(FINGERPRINT, GEOMETRY, hash_algorithm="sha256")
    settings = ClientSettings(socket=path, member=member, register=register, link=LinkSettings(call_deadline_s=30.0))
    with Client(settings, on_event=hear).start() as client:
        assert client.wait_until_served(60), client.fault
        client.subscribe(with_inventory=True)
        assert ended.wait(120), "the inventory does not end"
    assert told[0] == blocks, told
    return begun_s[0]


def measure(blocks: int) -> dict[str, float]:
    """Returns seconds in all, and those of the longest turn of the server's loop."""
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "s"
        arguments = [sys.executable, "-m", "benchmarks.inventory", "--serve", str(path), "--blocks", str(blocks)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "serves\n"
            took_s = take(path, blocks)
            server.stdin.close()
            longest_s = float(server.stdout.readline())
    return {"blocks": blocks, "seconds": round(took_s, 4), "longest_turn_ms": round(longest_s * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.blocks)
    else:
        print(json.dumps(measure(given.blocks)))


if __name__ == "__main__":
    main()
