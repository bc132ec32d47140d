"""Chained block hashes: full blocks only, and everything that changes the KV changes the hash."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.keys.block_hash import BlockHasher, MediaItem
from kvoffload.keys.canonical import encode_canonical

TOKENS = list(range(100, 100 + 70))
HASHER = BlockHasher(16, seed="s")
ROOT = HASHER.root()


def reference(tokens: list[int], block_size: int, parent: bytes, extras: list[bytes]) -> list[bytes]:
    """The definition, in hashlib."""
    hashes = []
    for index in range(len(tokens) // block_size):
        block = np.array(tokens[index * block_size : (index + 1) * block_size], "<u4").tobytes()
        head = parent + block_size.to_bytes(4, "little") + len(extras[index]).to_bytes(4, "little")
        parent = hashlib.sha256(head + block + extras[index]).digest()
        hashes.append(parent)
    return hashes


@given(st.lists(st.integers(0, 0xFFFFFFFF), max_size=200), st.integers(1, 40))
def test_hashes_follow_the_definition(tokens: list[int], block_size: int) -> None:
    hasher = BlockHasher(block_size)
    root = hasher.root()
    blank = [b""] * len(tokens)
    assert hasher.hash_blocks(tokens, parent=root) == reference(tokens, block_size, root, blank)


def test_a_partial_tail_is_never_keyed() -> None:
    assert len(HASHER.hash_blocks(TOKENS, parent=ROOT)) == 4
    assert HASHER.hash_blocks(TOKENS[:15], parent=ROOT) == []
    assert HASHER.hash_blocks([], parent=ROOT) == []


@given(st.integers(0, 4))
def test_a_request_hashed_in_pieces_has_the_same_hashes(cut: int) -> None:
    whole = HASHER.hash_blocks(TOKENS, parent=ROOT)
    first = HASHER.hash_blocks(TOKENS[: cut * 16], parent=ROOT)
    parent = first[-1] if first else ROOT
    assert first + HASHER.hash_blocks(TOKENS[cut * 16 :], parent=parent, position=cut * 16) == whole


def test_a_changed_token_changes_its_block_and_all_after_it() -> None:
    changed = [*TOKENS]
    changed[20] += 1
    one, other = HASHER.hash_blocks(TOKENS, parent=ROOT), HASHER.hash_blocks(changed, parent=ROOT)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, False]


def test_seed_block_size_adapter_and_salt_set_a_request_apart() -> None:
    roots = [
        ROOT,
        BlockHasher(16, seed="t").root(),
        BlockHasher(32, seed="s").root(),
        HASHER.root(adapter=b"\1" * 32),
        HASHER.root(salt="x"),
        HASHER.root(adapter=b"x"),
    ]
    assert len(set(roots)) == len(roots)


def test_media_content_and_place_count_in_the_blocks_they_touch() -> None:
    def hashes(*media: MediaItem) -> list[bytes]:
        return [bytes(item) for item in HASHER.hash_blocks(TOKENS, parent=ROOT, media=media)]

    cat, dog = MediaItem(identifier="cat", start=20, length=20), MediaItem(identifier="dog", start=20, length=20)
    shifted = MediaItem(identifier="cat", start=21, length=20)
    assert len({hashes(cat)[1], hashes(dog)[1], hashes(shifted)[1], hashes()[1]}) == 4
    assert hashes(cat)[0] == hashes()[0]
    extras = [b"", encode_canonical([["cat", 4]]), encode_canonical([["cat", -12]]), b""]
    assert hashes(cat) == reference(TOKENS, 16, ROOT, extras)


def test_media_after_the_full_blocks_or_before_the_piece_changes_nothing() -> None:
    tail = MediaItem(identifier="cat", start=66, length=3)
    assert HASHER.hash_blocks(TOKENS, parent=ROOT, media=[tail]) == HASHER.hash_blocks(TOKENS, parent=ROOT)
    early = MediaItem(identifier="cat", start=0, length=3)
    piece = HASHER.hash_blocks(TOKENS, parent=ROOT, position=32)
    assert HASHER.hash_blocks(TOKENS, parent=ROOT, position=32, media=[early]) == piece


def test_the_first_hash_is_golden() -> None:
    """Changing this value orphans every stored cache of engines without hashes of their own."""
    hasher = BlockHasher(4)
    assert hasher.algorithm == "kvoffload-sha256-1"
    (first,) = hasher.hash_blocks([1, 2, 3, 4], parent=hasher.root())
    assert first.hex() == "d49e6b642149b9c34730c882a0aadc2c95db516e0ec4bbcb3997236e5b252769"


def test_bad_input_is_refused() -> None:
    for tokens in ([-1] * 16, [1 << 32] * 16, [1 << 70] * 16):
        with pytest.raises(ValueError, match="token ids"):
            HASHER.hash_blocks(tokens, parent=ROOT)
    with pytest.raises(ValueError, match="position 5"):
        HASHER.hash_blocks(TOKENS, parent=ROOT, position=5)
    with pytest.raises(ValueError, match="block size 0"):
        BlockHasher(0)
    with pytest.raises(ValueError, match="media item"):
        MediaItem(identifier="", start=0, length=1)
    with pytest.raises(ValueError, match="dimensions"):
        HASHER.hash_blocks(np.zeros((2, 16), np.int64), parent=ROOT)
