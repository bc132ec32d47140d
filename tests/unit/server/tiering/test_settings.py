"""The names of a request's blocks in each group, and pieces of bounded size."""

from __future__ import annotations

import pytest

from kvoffload.hash_rows import as_rows
from kvoffload.server.tiering.settings import PIECE_BLOCKS, TierSpace, as_names, cut_pieces
from tests.kit.cache.cache_model import HYBRID, block_hashes, fingerprint, make_chain

SPACE = TierSpace(number=1, fingerprint=fingerprint("model"), geometry=HYBRID)


@pytest.mark.parametrize("limit", [0, 31, 32, 100, 160, 10_000])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_rows_are_the_blocks_names_up_to_the_limit(group: int, limit: int) -> None:
    chain = make_chain(1, 10)
    size = HYBRID.groups[group].rule.block_size
    names = block_hashes(chain, HYBRID, group)[: limit // size]
    assert SPACE.chain_rows(group, chain, limit).tobytes() == b"".join(names)


def test_a_block_is_all_its_shards() -> None:
    assert (SPACE.record_bytes(0), SPACE.block_bytes(0), SPACE.shards(0)) == (1000, 2000, 2)
    assert SPACE.names(1, bytes(64), 0).fingerprint == fingerprint("model")
    assert len(as_rows(bytes(96))) == 3


@pytest.mark.parametrize(
    ("count", "block_bytes", "sizes"), [(0, 10, []), (5, 40, [2, 2, 1]), (3, 1000, [1, 1, 1]), (4, 1, [4])]
)
def test_pieces_are_bounded_and_never_empty(count: int, block_bytes: int, sizes: list[int]) -> None:
    parts = list(cut_pieces(count, block_bytes, 80))
    assert [part.stop - part.start for part in parts] == sizes


def test_a_piece_of_small_blocks_is_bounded() -> None:
    assert list(cut_pieces(2000, 1, 1 << 20)) == [slice(0, PIECE_BLOCKS), slice(PIECE_BLOCKS, 2000)]


def test_names_are_their_own_also_those_that_end_in_zeros() -> None:
    hashes = b"".join(bytes([1] * i + [0] * (32 - i)) for i in range(33))
    assert len(set(as_names(as_rows(hashes)))) == 33
    assert len(set(as_names(as_rows(hashes)[1::2]))) == 16
