"""A request's blocks are found in parts, and no more of them are looked for than a request may cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import CacheGeometry, CacheGroup, GroupRule, LocalCache
from kvoffload.kvspec import ReuseRule
from kvoffload.server.common.steps import Unfinished, run_steps
from kvoffload.server.tiering import seen
from kvoffload.server.tiering.seen import (
    LOOKS_AT_ONCE,
    MAX_LOOKS,
    PART_LOOKS,
    Seen,
    bound_tokens,
    count_looks,
    look_for,
    serve_in_parts,
)
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.tiers import RecordNames
from tests.kit.cache.cache_model import HYBRID, PLAIN, SMALL, fingerprint, make_chain
from tests.kit.server.explained import store
from tests.kit.server.harness import Server


@dataclass
class CountedTier:
    """A tier that has the blocks whose first byte is even, in every shard but of those whose second byte is 0."""

    asked: list[int] = field(default_factory=list)

    def find_near(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        self.asked.append(len(names))
        rows = np.frombuffer(names.hashes, np.uint8).reshape(-1, 32)
        return (rows[:, 0] % 2 == 0) & ((names.shard == 0) | (rows[:, 1] != 0))


def space_of(geometry: CacheGeometry, number: int = 0) -> TierSpace:
    return TierSpace(number=number, fingerprint=fingerprint("model"), geometry=geometry)


def wide(groups: int, shards: int) -> CacheGeometry:
    rule = GroupRule(block_size=16, reuse=ReuseRule.PREFIX)
    return CacheGeometry(
        hash_block_size=16, groups=tuple(CacheGroup(rule=rule, record_bytes=64, shards=shards) for _ in range(groups))
    )


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with LocalCache.create(SMALL) as cache:
        yield cache


def test_what_memory_has_is_not_looked_for_in_tiers() -> None:
    chain = make_chain(1, 8)
    with Server() as server:
        engine = server.process("first").join(PLAIN)
        store(engine, chain[: 4 * 32])
        space, tier = space_of(PLAIN, engine.name_space), CountedTier()
        rows = space.chain_rows_of(chain, 8 * 16)
        found = run_steps(look_for(server.cache, space, rows, {3: tier.find_near}))
        assert found.in_memory[0].tolist() == [True] * 4 + [False] * 4
        assert tier.asked == [4]
        assert found.in_tiers[3][0].tolist() == [False] * 4 + [row[0] % 2 == 0 for row in rows[0][4:]]
        nothing = run_steps(look_for(None, space, rows, {3: tier.find_near}))
        assert not nothing.in_memory[0].any()
        assert nothing.in_tiers[3][0].tolist() == [row[0] % 2 == 0 for row in rows[0]]


def test_a_block_is_in_a_tier_if_all_its_records_are(cache: LocalCache) -> None:
    rows = [np.zeros((2, 32), np.uint8) for _ in range(2)]
    rows[1][:, 1] = 1
    found = run_steps(look_for(None, space_of(wide(2, 2)), rows, {0: CountedTier().find_near}))
    assert [group.tolist() for group in found.in_tiers[0]] == [[False, False], [True, True]]


def test_no_part_makes_many_more_looks_than_it_should(cache: LocalCache) -> None:
    """Neither of a long chain nor of one block with many shards."""
    for geometry, blocks in ((wide(2, 3), 10_000), (wide(64, 1), 300), (wide(1, 9000), 2)):
        geometry_space, tier = space_of(geometry), CountedTier()
        chain = np.zeros(32 * blocks, np.uint8).tobytes()
        rows = geometry_space.chain_rows_of(chain, blocks * 16)
        steps, most, parts = look_for(None, geometry_space, rows, {0: tier.find_near}), 0, 0
        while True:
            before = sum(tier.asked)
            try:
                next(steps)
            except StopIteration:
                break
            most, parts = max(most, sum(tier.asked) - before), parts + 1
        assert sum(tier.asked) == count_looks(geometry_space, rows) - sum(map(len, rows))
        assert most < 2 * PART_LOOKS
        assert parts >= sum(tier.asked) // (2 * PART_LOOKS)


@pytest.mark.parametrize(("groups", "shards"), [(1, 1), (64, 16), (2, 64), (1, 9000)])
def test_a_request_costs_no_more_than_it_may(groups: int, shards: int) -> None:
    space = space_of(wide(groups, shards))
    chain = bytes(32 * 131_072)
    looks = count_looks(space, space.chain_rows_of(chain, bound_tokens(space)))
    assert looks <= MAX_LOOKS
    longer = count_looks(space, space.chain_rows_of(chain, bound_tokens(space) + 16))
    assert longer > MAX_LOOKS or bound_tokens(space) >= 131_072 * 16


def test_groups_of_different_blocks_pay_for_what_they_have() -> None:
    space = space_of(HYBRID)
    tokens = bound_tokens(space) // 64 * 64
    assert tokens * (3 / 16 + 2 / 32 + 2 / 64) <= MAX_LOOKS < (tokens + 128) * (3 / 16 + 2 / 32 + 2 / 64)


def test_a_short_request_is_served_at_once_and_a_long_one_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "PART_LOOKS", 8)
    space, tier, heard = space_of(wide(1, 1)), CountedTier(), list[Seen]()
    rows = space.chain_rows_of(bytes(32 * 20), 20 * 16)

    def serve(looks: int) -> object:
        return serve_in_parts(look_for(None, space, rows, {0: tier.find_near}), heard.append, looks=looks)

    assert serve(LOOKS_AT_ONCE) is None
    assert len(heard) == 1
    find = serve(LOOKS_AT_ONCE + 1)
    assert callable(find)
    parts = 0
    while isinstance(found := find(), Unfinished):
        parts += 1
    assert (parts, len(heard)) == (2, 1)
    assert found() is None
    assert len(heard) == 2
    np.testing.assert_array_equal(heard[0].in_tiers[0][0], heard[1].in_tiers[0][0])


def test_of_the_beginning_of_a_request_the_beginning_is_known() -> None:
    whole = Seen([np.array([True, False, True])], {1: [np.array([False, True, False])]})
    cut = whole.cut([np.zeros((2, 32), np.uint8)])
    assert (cut.in_memory[0].tolist(), cut.in_tiers[1][0].tolist()) == ([True, False], [False, True])
