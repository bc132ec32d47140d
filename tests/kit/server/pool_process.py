"""A process with a pool that is full of blocks, for tests that make its memory short; and one that takes memory.

`python -m tests.kit.server.pool_process pool MIB CGROUP_PROCS` writes a line of JSON whenever its counts have changed,
until its input ends. The last line says how many of the chains were there whole, each with its own bytes.
`python -m tests.kit.server.pool_process hog MIB CGROUP_PROCS` takes memory step by step whenever there is room for a
step, writes `full`, and keeps the memory until its input ends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from kvoffload.cache import CacheSettings, LocalCache, SessionId
from kvoffload.native import memory_headroom_bytes
from kvoffload.server.sessions.pools import Pools
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN, block_hashes, fingerprint, has_pattern, make_chain
from tests.kit.cache.chains import save_chain

SEGMENT_BYTES = 32 * MIB
CALM_S = 1.0
STEP_BYTES = 4 * MIB
CHAIN_BLOCKS = 1024


def run_pool(pool_bytes: int) -> None:
    """Serves the pool as a server's loop does."""
    settings = CacheSettings(
        memory_bytes=pool_bytes, segment_bytes=SEGMENT_BYTES, step_bytes=SEGMENT_BYTES, entry_limit=1 << 18
    )
    pools = Pools({"": settings}, clock=time.monotonic, calm_s=CALM_S)
    pools.begin()
    while not pools.take_ready():
        time.sleep(0.01)
    cache = pools.caches[""]
    pools.tick()
    while cache.ready_bytes < cache.capacity_bytes:
        time.sleep(0.01)
    name_space, session = cache.open_namespace(fingerprint("a"), PLAIN), cache.open_session()
    chains = [make_chain(number, CHAIN_BLOCKS) for number in range(pool_bytes // (CHAIN_BLOCKS * 4096))]
    for chain in chains:
        save_chain(cache, session, name_space, chain)
    told: dict[str, Any] = {}
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        pools.tick()
        stats = cache.stats
        now = {"ready": stats.ready_bytes, "given_back": stats.given_back_bytes, "reason": stats.memory_reason}
        if now != told:
            told = now
            print(json.dumps(now), flush=True)
    print(json.dumps({"read": count_right(cache, session, name_space, chains)}), flush=True)
    pools.stop()
    pools.close()


def count_right(cache: LocalCache, session: SessionId, name_space: int, chains: list[bytes]) -> int:
    """Returns how many chains are there whole; each must have its own bytes."""
    count = 0
    for chain in chains:
        leased = cache.acquire_entries(session, name_space, 0, chain)
        if leased.lease:
            names = block_hashes(chain, PLAIN, 0)
            places = zip(names, leased.groups[0].addresses.tolist(), strict=True)
            assert all(has_pattern(cache, PLAIN, (name_space, 0), name, address) for name, address in places)
            cache.release(session, leased.lease)
            count += 1
    return count


def run_hog(size_bytes: int) -> None:
    held = mmap.mmap(-1, size_bytes)
    page = b"x" * STEP_BYTES
    for offset in range(0, size_bytes, STEP_BYTES):
        while memory_headroom_bytes() < 2 * STEP_BYTES:
            time.sleep(0.01)
        held[offset : offset + STEP_BYTES] = page
    print("full", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(str(os.getpid()))
    {"pool": run_pool, "hog": run_hog}[sys.argv[1]](int(sys.argv[2]) * MIB)
