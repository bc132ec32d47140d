"""Pins in vLLM's own block pool."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from kvoffload.connector.saves.pins import BlockPins


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, enable_caching=True, hash_block_size=4)


def test_a_pinned_block_is_not_given_away_when_its_owner_ends(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    blocks = pool.get_new_blocks(3)
    pins.pin([blocks[1].block_id])
    pool.free_blocks(blocks)
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    assert blocks[1] not in others
    assert pool.get_num_free_blocks() == 0
    pins.unpin([blocks[1].block_id])
    assert pool.get_new_blocks(1) == [blocks[1]]


def test_a_pin_of_a_free_block_takes_it_from_the_free_list(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    before = pool.get_num_free_blocks()
    pins.pin([3])
    assert pool.get_num_free_blocks() == before - 1
    pins.unpin([3])
    assert pool.get_num_free_blocks() == before


def test_pins_count_and_are_bounded(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=3)
    pins.pin([1, 2])
    assert pins.count == 2
    assert pins.room == 1
    pins.pin([1])
    assert pins.room == 0
    with pytest.raises(AssertionError):
        pins.pin([4])
    pins.unpin([1, 2])
    assert pins.count == 1
    pins.unpin([1])
    with pytest.raises(AssertionError):
        pins.unpin([5])


def test_a_block_pinned_twice_needs_both_pins_undone(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    pins.pin([3])
    pins.pin([3])
    pins.unpin([3])
    assert pool.blocks[3].ref_cnt == 1
    pins.unpin([3])
    assert pool.blocks[3].ref_cnt == 0


def test_blocks_come_back_behind_all_others_and_the_deepest_first(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    for block in (2, 3, 4):
        pool.blocks[block].set_block_hash(BlockHashWithGroupId(bytes([block])), num_tokens=4)
    pins.pin([2, 3, 4])
    pins.unpin([2, 3, 4])
    assert [block.block_id for block in pool.get_new_blocks(7)] == [1, 5, 6, 7, 4, 3, 2]


def test_blocks_that_are_next_come_back_before_all_others_in_their_order(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    pins.pin([3, 2, 4])
    pins.unpin([3, 2, 4], is_next=True)
    assert pins.count == 0
    assert [block.block_id for block in pool.get_new_blocks(7)] == [3, 2, 4, 1, 5, 6, 7]


def test_blocks_that_are_next_and_in_use_by_now_stay_with_their_users(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    pins.pin([3, 2])
    pool.touch([pool.blocks[3]])
    pins.unpin([3, 2], is_next=True)
    assert pool.blocks[3].ref_cnt == 1
    assert [block.block_id for block in pool.get_new_blocks(6)] == [2, 1, 4, 5, 6, 7]


def test_the_prefix_cache_cannot_be_reset_under_a_pin(pool: BlockPool) -> None:
    pins = BlockPins(pool, limit=4)
    pins.pin([3])
    assert not pool.reset_prefix_cache()
    pins.unpin([3])
    assert pool.reset_prefix_cache()
