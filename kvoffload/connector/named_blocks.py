"""Blocks of the engine that are to be saved, and the names that they are saved under."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.types import HASH_BYTES


@dataclass(frozen=True, eq=False)
class NamedBlocks:
    """Of one group. Names are 32 bytes each, one behind the other."""

    group: int
    hashes: bytes
    parents: bytes
    blocks: npt.NDArray[np.int64]

    def choose(self, index: npt.NDArray[np.intp]) -> NamedBlocks:
        """Some of them, in this order."""
        return NamedBlocks(self.group, _choose(self.hashes, index), _choose(self.parents, index), self.blocks[index])


def _choose(rows: bytes, index: npt.NDArray[np.intp]) -> bytes:
    if len(index) * HASH_BYTES == len(rows):
        return rows
    return np.frombuffer(rows, np.uint8).reshape(-1, HASH_BYTES)[index].tobytes()
