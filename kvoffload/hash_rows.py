"""Hashes of many blocks, which travel as one piece of bytes, as the rows of an array."""

from __future__ import annotations

import os

import numpy as np
import numpy.ma  # np.unique imports it at its first call, which would hold up the server's loop or an engine's step
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.types import HASH_BYTES

_KEYS = np.frombuffer(os.urandom(HASH_BYTES), "<u8") | np.uint64(1)
"""Factors by which parts of hashes are mixed: they are random, so no hashes can be chosen that become equal."""

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


def find_first(rows: Rows) -> npt.NDArray[np.intp] | None:
    """Returns the places at which hashes come for the first time, in rising order. None: no hash comes twice."""
    mixed = (np.ascontiguousarray(rows).view("<u8") * _KEYS).sum(axis=1, dtype=np.uint64)
    if len(np.unique(mixed)) == len(rows):
        return None
    _, first, same = np.unique(mixed, return_index=True, return_inverse=True)
    # Where different hashes have become equal by chance, none is left out.
    return np.sort(first) if np.array_equal(rows[first][same.ravel()], rows) else None
