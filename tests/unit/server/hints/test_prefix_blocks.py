"""What a load needs, group by group, and what of it was loaded since."""

from __future__ import annotations

import numpy as np

from kvoffload.cache import Ask
from kvoffload.server.hints.prefix_blocks import Prefix
from kvoffload.server.tiering.terms import TierSpace
from tests.kit.cache.cache_model import HYBRID, PLAIN, block_hashes, fingerprint, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import Server

SPACE = TierSpace(number=0, fingerprint=fingerprint("model"), geometry=HYBRID)


def test_a_hybrid_prefix_is_cut_to_what_a_load_needs() -> None:
    chain = make_chain(1, 12)
    prefix = Prefix(SPACE, chain, 10_000)
    assert prefix.most == 192
    blocks = prefix.cut(128)
    wanted = [
        block_hashes(chain, HYBRID, 0)[:8],
        block_hashes(chain, HYBRID, 1)[2:4],
        block_hashes(chain, HYBRID, 2)[1:2],
    ]
    assert blocks.parts == tuple((group, b"".join(names)) for group, names in enumerate(wanted))
    assert blocks.size_bytes == 8 * 2000 + 2 * 4096 + 40 * 1024
    assert prefix.name(128) == chain[7 * 32 : 8 * 32]
    lacking = [np.arange(len(rows)) == 3 for rows in prefix.rows]
    assert prefix.cut(128, lacking).parts == ((0, wanted[0][3]), (1, wanted[1][1]))


def test_tokens_beyond_the_limit_are_not_meant() -> None:
    assert Prefix(SPACE, make_chain(1, 12), 100).most == 64
    assert Prefix(SPACE, b"", 100).most == 0


def test_what_was_loaded_since_a_moment_is_told_from_what_was_before() -> None:
    chain = make_chain(1, 8)
    with Server() as server:
        engine, cache = server.process("first").join(PLAIN), server.cache
        store(engine, chain)
        space = TierSpace(number=engine.name_space, fingerprint=fingerprint("model"), geometry=PLAIN)
        session = cache.open_session()
        blocks = Prefix(space, chain, 128).cut(128)
        assert cache.acquire(session, engine.name_space, Ask(chain[:64])).is_hit
        since = cache.use_clock
        assert (blocks.was_used(cache, since=since), blocks.count_used(cache, since=since)) == (False, 0)
        assert cache.acquire(session, engine.name_space, Ask(chain, local=32, limit=80)).is_hit
        assert (blocks.was_used(cache, since=since), blocks.count_used(cache, since=since)) == (True, 48)
