"""Hashes of many blocks are rows of the same bytes, and some of them are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.hash_rows import as_rows, choose_rows, count_hashes, find_first
from kvoffload.types import HASH_BYTES

NAMES = [bytes([number] * HASH_BYTES) for number in range(4)]
HASHES = b"".join(NAMES)


@pytest.mark.parametrize("hashes", [HASHES, bytearray(HASHES), memoryview(HASHES)])
def test_each_hash_is_a_row(hashes: bytes) -> None:
    assert [row.tobytes() for row in as_rows(hashes)] == NAMES
    assert len(as_rows(b"")) == 0


def test_rows_are_not_copied() -> None:
    room = bytearray(HASHES)
    rows = as_rows(room)
    room[0] = 7
    assert rows[0, 0] == 7


def test_half_a_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        as_rows(HASHES[:-1])


@pytest.mark.parametrize("hashes", [HASHES, memoryview(HASHES), np.frombuffer(HASHES, np.uint8).reshape(4, -1)])
def test_some_are_chosen_by_place_or_by_truth(hashes: bytes) -> None:
    assert choose_rows(hashes, np.array([1, 3])) == NAMES[1] + NAMES[3]
    assert choose_rows(hashes, np.array([True, False, False, True])) == NAMES[0] + NAMES[3]
    assert choose_rows(hashes, np.arange(4)) == choose_rows(hashes, np.ones(4, np.bool_)) == HASHES
    assert choose_rows(hashes, np.arange(0)) == choose_rows(hashes, np.zeros(4, np.bool_)) == b""
    assert choose_rows(b"", np.zeros(0, np.bool_)) == b""


def test_hashes_are_counted_in_any_buffer() -> None:
    assert count_hashes(b"") == 0
    assert count_hashes(memoryview(bytes(96))) == 3
    assert count_hashes(np.zeros((2, 32), np.uint8)) == 2
    with pytest.raises(ValueError, match="32 bytes each, not 33"):
        count_hashes(bytes(33))


def test_of_hashes_that_come_again_the_first_are_found() -> None:
    assert find_first(as_rows(HASHES)) is None
    assert find_first(as_rows(b"")) is None
    again = find_first(as_rows(NAMES[2] + NAMES[0] + NAMES[2] + NAMES[1] + NAMES[0]))
    assert again is not None
    assert again.tolist() == [0, 1, 3]
    every_other = find_first(as_rows((NAMES[0] + NAMES[1]) * 2)[::2])
    assert every_other is not None
    assert every_other.tolist() == [0]
