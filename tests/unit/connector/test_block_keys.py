"""Names of blocks from vLLM's own chained hashes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from kvoffload.connector.block_keys import BlockKeys
from kvoffload.errors import BlockAlignmentError
from tests.unit.connector.scripted import make_request


def test_a_block_is_named_by_the_hash_of_its_last_part() -> None:
    keys = BlockKeys(hash_block_size=2, block_sizes=[2, 6])
    request = make_request("a", range(13), hash_block_size=2)
    assert keys.hashed_tokens(request) == 12
    assert keys.key(request, 0, 0) == (0, request.block_hashes[0])
    assert keys.key(request, 0, 5) == (0, request.block_hashes[5])
    assert keys.key(request, 1, 0) == (1, request.block_hashes[2])
    assert keys.key(request, 1, 1) == (1, request.block_hashes[5])


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_names_are_those_of_vllms_own_prefix_cache(block_size: int) -> None:
    keys = BlockKeys(hash_block_size=2, block_sizes=[block_size])
    request = make_request("a", range(17), hash_block_size=2)
    theirs = resolve_block_hashes(request.block_hashes, 2, block_size)
    ours = [keys.key(request, 0, position).block_hash for position in range(16 // block_size)]
    assert ours == [theirs[position] for position in range(16 // block_size)]


def test_a_name_depends_on_every_token_before_it() -> None:
    keys = BlockKeys(hash_block_size=4, block_sizes=[4])
    one, other = (make_request("a", [first, *range(1, 12)], hash_block_size=4) for first in (0, 99))
    assert keys.key(one, 0, 2) != keys.key(other, 0, 2)


def test_decoded_tokens_are_hashed_as_they_come() -> None:
    keys = BlockKeys(hash_block_size=4, block_sizes=[4])
    request = make_request("a", range(7), hash_block_size=4)
    assert keys.hashed_tokens(request) == 4
    request.append_output_token_ids(1)
    assert keys.hashed_tokens(request) == 8


def test_a_block_size_that_hashes_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(BlockAlignmentError, match=r"group 1.*6 tokens.*4 tokens.*prefix caching"):
        BlockKeys(hash_block_size=4, block_sizes=[8, 6])
