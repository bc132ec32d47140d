"""A full pool keeps as much of a model in several groups of full attention, as stages of a pipeline have, as in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from kvoffload.cache import (
    Ask,
    CacheGeometry,
    CacheGroup,
    CacheSettings,
    GroupRule,
    HugePages,
    LocalCache,
    LocalSession,
    Publication,
)
from kvoffload.kvspec import ReuseRule
from kvoffload.native import sha256
from kvoffload.types import HASH_BYTES, Fingerprint

TOKENS = 16
POOL_BYTES = 16 << 20
BLOCK_BYTES = 24 << 10
"""Bytes of a block in all groups together: the pool has room for some 680 blocks."""
PROMPTS, REQUESTS = 400, 2000
PIECE = 8
"""Blocks that are saved at once."""


def serve(record_bytes: Sequence[int]) -> float:
    """The share of the blocks asked for that hit, of conversations that grow and of which some come more often."""
    rule = GroupRule(block_size=TOKENS, reuse=ReuseRule.PREFIX)
    cache = LocalCache.create(
        CacheSettings(
            memory_bytes=POOL_BYTES,
            segment_bytes=POOL_BYTES,
            extent_bytes=64 << 10,
            entry_limit=1 << 15,
            huge_pages=HugePages.NONE,
            threads=1,
        )
    )
    groups = [CacheGroup(rule=rule, record_bytes=size) for size in record_bytes]
    session = LocalSession(cache, Fingerprint(b"f" * 32), CacheGeometry(hash_block_size=TOKENS, groups=groups))
    random, weights = Random(5), [1 / (at + 1) ** 0.8 for at in range(PROMPTS)]
    lengths: dict[int, int] = defaultdict(lambda: random.randint(4, 40))
    asked = hit = 0
    for prompt in random.choices(range(PROMPTS), weights, k=REQUESTS):
        lengths[prompt] += random.choice((0, 0, 1, 3))
        chain = b"".join(sha256(f"{prompt} {at}".encode()) for at in range(lengths[prompt]))
        found = session.acquire(Ask(chain, limit=TOKENS * lengths[prompt], alignment=TOKENS))
        if found.lease is not None:
            hit += found.boundary // TOKENS
            session.release(found.lease)
        asked += lengths[prompt]
        save_missing(session, len(groups), chain)
    return hit / asked


def save_missing(session: LocalSession, groups: int, chain: bytes) -> None:
    """In pieces, each in all groups or in none."""
    names = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
    is_there = np.logical_and.reduce([session.lookup(group, chain) for group in range(groups)])
    missing = np.flatnonzero(~is_there).tolist()
    for at in range(0, len(missing), PIECE):
        piece = missing[at : at + PIECE]
        taken = [session.reserve(group, count=len(piece)) for group in range(groups)]
        taken = [slots[slots.tickets != 0] for slots in taken]
        count = min(map(len, taken))
        for slots in taken:
            session.abort(slots[count:])
            session.publish(
                Publication(
                    slots[:count],
                    hashes=b"".join(names[block] for block in piece[:count]),
                    parents=b"".join(names[block - 1] if block else bytes(HASH_BYTES) for block in piece[:count]),
                )
            )
        if count < len(piece):
            return


@pytest.fixture(scope="module")
def in_one() -> float:
    return serve([BLOCK_BYTES])


@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 1, 1, 1)], ids=["two-stages", "unequal-stages", "four-stages"])
def test_what_is_kept_in_several_groups_hits_as_often_as_in_one(in_one: float, shares: tuple[int, ...]) -> None:
    assert 0.3 < in_one < 0.7
    assert serve([BLOCK_BYTES * share // sum(shares) for share in shares]) > in_one - 0.01
