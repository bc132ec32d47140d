"""Hashes of many blocks, which travel as one piece of bytes, as the rows of an array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.types import HASH_BYTES

Rows = npt.NDArray[np.uint8]
"""A hash each."""


def as_rows(hashes: Buffer) -> Rows:
    """Returns the same bytes as rows, not copied."""
    return np.frombuffer(memoryview(hashes), np.uint8).reshape(-1, HASH_BYTES)


def choose_rows(hashes: Buffer, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> bytes:
    """Returns some of the rows: by their places in rising order, or by a truth for each."""
    rows = as_rows(hashes)
    is_all = chosen.all() if chosen.dtype == np.bool_ else len(chosen) == len(rows)
    return bytes(hashes) if is_all else rows[chosen].tobytes()


def count_hashes(hashes: Buffer) -> int:
    size = memoryview(hashes).nbytes
    if size % HASH_BYTES:
        raise ValueError(f"hashes have {HASH_BYTES} bytes each, not {size} in all")
    return size // HASH_BYTES
