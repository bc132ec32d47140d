"""Hashes and numbers of many blocks, as messages have them: one contiguous blob. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.protocol.limits import MAX_BATCH
from kvoffload.types import HASH_BYTES

_WIRE = np.dtype("<u8")


def count_hashes(hashes: Buffer) -> int:
    size = memoryview(hashes).nbytes
    if size % HASH_BYTES:
        raise ValueError(f"hashes have {HASH_BYTES} bytes each, not {size} in all")
    return size // HASH_BYTES


def cut_batches(chosen: npt.NDArray[np.bool_], *, values: int = 1) -> Iterator[npt.NDArray[np.intp]]:
    """Positions of what was chosen, in parts that fit a message which has at most so many values for each."""
    positions = np.flatnonzero(chosen)
    batch = max(MAX_BATCH // values, 1)
    for start in range(0, len(positions), batch):
        yield positions[start : start + batch]


def read_numbers(blob: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(blob, _WIRE).astype(np.uint64, copy=False)


def to_blob(numbers: npt.NDArray[np.uint64]) -> bytes:
    return numbers.astype(_WIRE, copy=False).tobytes()
