"""Rule 6: every group's block size is a multiple of the hash block size, or the error says what to change."""

from __future__ import annotations

import pytest

from kvoffload.errors import BlockAlignmentError
from kvoffload.kvspec import GroupSpec, StateSpec, check_alignment, recurrent_layer
from tests.kit.kvspec.builders import attention


def full(block_size: int, **changes: object) -> GroupSpec:
    layer = attention("layers.0", block_size=block_size, **changes)
    return GroupSpec(name="full attention", layers=(layer,), block_size=block_size)


def recurrent(block_size: int) -> GroupSpec:
    layer = recurrent_layer("layers.1", block_size=block_size, states=(StateSpec("s", (1,), "int8"),))
    return GroupSpec(name="gdn", layers=(layer,), block_size=block_size)


@pytest.mark.parametrize(("block_size", "hash_block_size"), [(16, 16), (640, 16), (640, 640), (2, 1)])
def test_multiples_are_aligned(block_size: int, hash_block_size: int) -> None:
    check_alignment([full(block_size)], hash_block_size=hash_block_size)


def test_the_error_of_a_hybrid_model_has_both_numbers_the_group_and_the_remedy() -> None:
    """vLLM #38554: without prefix caching a hybrid model's attention keeps its small blocks."""
    with pytest.raises(BlockAlignmentError) as caught:
        check_alignment([recurrent(640), full(16)], hash_block_size=640)
    assert str(caught.value) == (
        "group full attention: block size 16 is not a multiple of hash block size 640; enable prefix caching "
        "(vLLM: --enable-prefix-caching): for hybrid models (recurrent layers and attention) the engine then aligns "
        "block sizes"
    )
    assert caught.value.context == {"group": "full attention", "block_size": 16, "hash_block_size": 640}


def test_other_models_are_told_a_block_size() -> None:
    with pytest.raises(BlockAlignmentError, match="set a block size that is a multiple of 16"):
        check_alignment([full(24)], hash_block_size=16)


def test_groups_that_are_not_stored_have_no_keys_to_align() -> None:
    check_alignment([full(24, excluded="rebuilt"), full(32)], hash_block_size=16)


def test_a_hash_block_has_tokens() -> None:
    with pytest.raises(BlockAlignmentError, match="hash_block_size is 0"):
        check_alignment([full(16)], hash_block_size=0)
