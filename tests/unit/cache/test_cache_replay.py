"""The cache keeps what `kvoffload replay` says it would: the same policies, driven the same way."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvoffload import native
from kvoffload.cache import Ask, CacheGeometry, CacheGroup, CacheSettings, GroupRule, LocalCache
from kvoffload.kvspec import ReuseRule
from tests.kit.cache.cache_model import fingerprint
from tests.kit.cache.chains import make_requests

RECORD_BYTES = 64
SLOTS = 512
GEOMETRY = CacheGeometry(
    hash_block_size=1,
    groups=(CacheGroup(rule=GroupRule(block_size=1, reuse=ReuseRule.PREFIX), record_bytes=RECORD_BYTES),),
)


def name_blocks(ids: list[int]) -> bytes:
    """A chain as an engine makes it: each hash covers everything before."""
    chain, parent = [], bytes(32)
    for number in ids:
        parent = hashlib.sha256(parent + number.to_bytes(8, "little")).digest()
        chain.append(parent)
    return b"".join(chain)


def serve(cache: LocalCache, requests: list[list[int]]) -> int:
    """Blocks that the cache had when they were asked for."""
    name_space = cache.open_namespace(fingerprint("replay"), GEOMETRY)
    session = cache.open_session()
    hits = 0
    for ids in requests:
        chain = name_blocks(ids)
        acquired = cache.acquire(session, name_space, Ask(chain))
        hits += acquired.boundary
        if acquired.is_hit:
            cache.release(session, acquired.lease)
        missing = chain[32 * acquired.boundary :]
        parents = (bytes(32) + chain)[32 * acquired.boundary : -32]
        reservation = cache.reserve(session, name_space, 0, hashes=missing)
        wanted = np.flatnonzero(reservation.tickets)
        cache.commit(
            session,
            name_space,
            0,
            reservation.tickets[wanted],
            hashes=b"".join(missing[32 * i : 32 * i + 32] for i in wanted),
            parents=b"".join(parents[32 * i : 32 * i + 32] for i in wanted),
            digests=np.ones(len(wanted), np.uint64),
        )
    return hits


@pytest.mark.parametrize("policy", native.policy_names())
@pytest.mark.parametrize("seed", [1, 2])
def test_the_cache_serves_what_the_replay_says(policy: str, seed: int) -> None:
    requests = make_requests(seed)
    trace = native.ReplayTrace()
    ends = np.cumsum([len(ids) for ids in requests], dtype=np.uint64)
    trace.add(np.concatenate([np.array(ids, np.uint64) for ids in requests]), ends)
    expected = native.replay_policy(trace, policy, SLOTS, False)
    settings = CacheSettings(
        memory_bytes=SLOTS * RECORD_BYTES, segment_bytes=4096, extent_bytes=4096, entry_limit=SLOTS, policy=policy
    )
    with LocalCache.create(settings) as cache:
        hits = serve(cache, requests)
        evicted = cache.stats.evicted
    # These remember names by some of their bits, and the cache has other names than the replay.
    tolerance = {"s3fifo": 0.01, "prefix": 0.02}.get(policy, 0)
    assert hits == pytest.approx(expected["hits"], rel=tolerance, abs=0)
    assert evicted == pytest.approx(expected["evicted"], rel=tolerance, abs=0)
    assert evicted > 0
