"""The blocks that a load needs, group by group, and those of them that were loaded since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.cache import Ask
from kvoffload.server.hints import prefix_blocks
from kvoffload.server.hints.prefix_blocks import Prefix
from kvoffload.server.tiering import seen
from kvoffload.server.tiering.settings import TierSpace
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


def test_of_a_prefix_that_costs_more_than_it_may_the_beginning_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is known that this is not all of it."""
    whole = Prefix(SPACE, make_chain(1, 12), 10_000)
    assert not whole.is_cut
    monkeypatch.setattr(seen, "MAX_LOOKS", whole.looks // 2)
    cut = Prefix(SPACE, make_chain(1, 12), 10_000)
    assert cut.is_cut
    assert 0 < cut.looks <= whole.looks // 2
    assert 0 < cut.limit < whole.limit
    assert [rows.tolist() for rows in cut.rows] == [
        rows[: len(cut.rows[group])].tolist() for group, rows in enumerate(whole.rows)
    ]


def test_a_block_that_comes_twice_is_named_once() -> None:
    chain = make_chain(1, 2)
    space = TierSpace(number=0, fingerprint=fingerprint("model"), geometry=PLAIN)
    blocks = Prefix(space, chain + chain, 64).cut(64)
    assert (blocks.parts, blocks.count, blocks.tokens) == (((0, chain),), 2, 64)


def test_of_a_long_prefix_it_is_estimated_how_much_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1, 8)
    with Server() as server:
        engine, cache = server.process("first").join(PLAIN), server.cache
        store(engine, chain)
        space = TierSpace(number=engine.name_space, fingerprint=fingerprint("model"), geometry=PLAIN)
        blocks, since = Prefix(space, chain, 128).cut(128), cache.use_clock
        assert cache.acquire(cache.open_session(), engine.name_space, Ask(chain, limit=64)).is_hit
        asked = list[int]()
        find_used = cache.find_used

        def note(name_space: int, group: int, hashes: bytes, **settings: Any) -> Any:
            asked.append(len(hashes) // 32)
            return find_used(name_space, group, hashes, **settings)

        monkeypatch.setattr(cache, "find_used", note)
        assert blocks.count_used(cache, since=since) == 64
        monkeypatch.setattr(prefix_blocks, "COUNTED_BLOCKS", 4)
        assert blocks.count_used(cache, since=since) == 64
        assert asked == [8, 4]
