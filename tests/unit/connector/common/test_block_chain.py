"""Names of blocks from vLLM's own chained hashes."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.kvspec import ReuseRule
from tests.kit.connector.facts import group_facts
from tests.kit.connector.scripted import make_request

MASK = bytes(range(32))
NONE = bytes(32)


def make_chain(*sizes: int, mask: bytes = NONE, hash_block_size: int = 2) -> BlockChain:
    """Groups of full attention with these block sizes."""
    groups = [group_facts(at, block_size=size) for at, size in enumerate(sizes)]
    return BlockChain(GroupTable(groups, hash_block_size=hash_block_size, alignment=hash_block_size), mask)


def cut(rows: bytes) -> list[bytes]:
    return [rows[at : at + 32] for at in range(0, len(rows), 32)]


def test_a_block_is_named_by_the_hash_of_its_last_part() -> None:
    chain = make_chain(2, 6)
    request = make_request("a", range(13), hash_block_size=2)
    chain.follow(request.block_hashes)
    assert chain.tokens == 12
    assert cut(chain.data) == list(request.block_hashes)
    assert cut(chain.names(0, range(6))) == list(request.block_hashes)
    assert cut(chain.names(0, range(5, 6))) == [request.block_hashes[5]]
    assert cut(chain.names(1, range(2))) == [request.block_hashes[2], request.block_hashes[5]]
    assert cut(chain.names(1, range(1, 2))) == [request.block_hashes[5]]
    assert chain.names(1, range(0)) == b""


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_names_are_those_of_vllms_own_prefix_cache(block_size: int) -> None:
    chain = make_chain(block_size)
    request = make_request("a", range(17), hash_block_size=2)
    chain.follow(request.block_hashes)
    theirs = resolve_block_hashes(request.block_hashes, 2, block_size)
    positions = range(16 // block_size)
    assert cut(chain.names(0, positions)) == [theirs[position] for position in positions]


def test_a_name_depends_on_every_token_before_it() -> None:
    chains = []
    for first in (0, 99):
        chain = make_chain(4, hash_block_size=4)
        chain.follow(make_request("a", [first, *range(1, 12)], hash_block_size=4).block_hashes)
        chains.append(chain)
    assert chains[0].names(0, range(2, 3)) != chains[1].names(0, range(2, 3))


def test_decoded_tokens_are_followed_as_they_come() -> None:
    chain = make_chain(4, hash_block_size=4)
    request = make_request("a", range(7), hash_block_size=4)
    chain.follow(request.block_hashes)
    assert chain.tokens == 4
    request.append_output_token_ids(1)
    chain.follow(request.block_hashes)
    chain.follow(request.block_hashes)
    assert chain.tokens == 8
    assert cut(chain.data) == list(request.block_hashes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.booleans())
def test_followed_in_any_parts_it_is_the_same(counts: list[int], is_masked: bool) -> None:
    """If there are fewer hashes than before, the request was shortened, and the chain is built again."""
    hashes = [bytes([at]) * 32 for at in range(9)]
    chain, at_once = (make_chain(2, mask=MASK if is_masked else NONE) for _ in range(2))
    for count in counts:
        chain.follow(hashes[:count])
    at_once.follow(hashes[: counts[-1]])
    assert (chain.data, chain.tokens) == (at_once.data, at_once.tokens)


def test_a_mask_changes_every_name_and_another_mask_to_another_one() -> None:
    hashes = make_request("a", range(13), hash_block_size=2).block_hashes
    names: list[bytes] = []
    for mask in (NONE, MASK, MASK[::-1]):
        chain = make_chain(2, 6, mask=mask)
        chain.follow(hashes)
        names += cut(chain.names(0, range(6)))
        assert cut(chain.names(1, range(2))) == [cut(chain.data)[2], cut(chain.data)[5]]
    assert len(set(names)) == 18


def test_shorter_hashes_are_filled_up() -> None:
    chain = make_chain(2)
    chain.follow([b"a" * 16, b"b" * 16])
    assert cut(chain.data) == [b"a" * 16 + bytes(16), b"b" * 16 + bytes(16)]


# ---- parents ----


@pytest.mark.parametrize("block_size", [2, 4, 6])
def test_before_each_block_of_full_attention_is_the_block_before(block_size: int) -> None:
    chain = make_chain(block_size)
    chain.follow([bytes([at + 1]) * 32 for at in range(12)])
    positions = range(24 // block_size)
    names = cut(chain.names(0, positions))
    assert cut(chain.parents(0, positions)) == [NONE, *names[:-1]]
    for first, last in pairwise(positions):
        assert cut(chain.parents(0, range(last, last + 1))) == [names[first]]
    assert chain.parents(0, range(0)) == b""


@pytest.mark.parametrize(("prefix", "size"), [(2, 2), (2, 4), (4, 2), (4, 6), (8, 12), (6, 4)])
def test_before_a_window_is_the_block_of_full_attention_that_ends_with_it(prefix: int, size: int) -> None:
    groups = [
        group_facts(0, ReuseRule.WINDOW, block_size=size, window=size),
        group_facts(1, block_size=prefix),
        group_facts(2, block_size=2),
    ]
    chain = BlockChain(GroupTable(groups, hash_block_size=2, alignment=2))
    chain.follow([bytes([at + 1]) * 32 for at in range(12)])
    ends = {(at + 1) * prefix: name for at, name in enumerate(cut(chain.names(1, range(24 // prefix))))}
    positions = range(1, 24 // size)
    assert cut(chain.parents(0, positions)) == [ends.get((at + 1) * size, NONE) for at in positions]


def test_without_full_attention_a_window_comes_after_the_window_before() -> None:
    groups = [group_facts(0, ReuseRule.WINDOW, window=4)]
    chain = BlockChain(GroupTable(groups, hash_block_size=4, alignment=4))
    chain.follow([bytes([at + 1]) * 32 for at in range(3)])
    assert cut(chain.parents(0, range(3))) == [NONE, *cut(chain.names(0, range(2)))]
