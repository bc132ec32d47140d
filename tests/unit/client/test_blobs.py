"""Blobs of hashes and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.client.blobs import count_hashes, cut_batches, read_numbers, to_blob
from kvoffload.protocol.limits import MAX_BATCH


def test_hashes_are_counted_in_any_buffer() -> None:
    assert count_hashes(b"") == 0
    assert count_hashes(memoryview(bytes(96))) == 3
    assert count_hashes(np.zeros((2, 32), np.uint8)) == 2
    with pytest.raises(ValueError, match="32 bytes each, not 33"):
        count_hashes(bytes(33))


def test_what_is_chosen_fits_messages() -> None:
    chosen = np.ones(MAX_BATCH + 3, np.bool_)
    chosen[1] = False
    parts = list(cut_batches(chosen))
    assert [len(part) for part in parts] == [MAX_BATCH, 2]
    assert np.concatenate(parts).tolist() == [0, *range(2, MAX_BATCH + 3)]
    assert list(cut_batches(np.zeros(5, np.bool_))) == []


def test_numbers_are_little_endian() -> None:
    assert read_numbers(b"\x01" + bytes(7)).tolist() == [1]
    assert to_blob(np.array([1, 2**63], np.uint64)) == b"\x01" + bytes(14) + b"\x80"
