"""Blocks of the engine that are to be saved, and the names that they are saved under."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    tenant: str = ""
    """Whose they are, as the request said."""

    def choose(self, index: npt.NDArray[np.intp]) -> NamedBlocks:
        """Some of them, in this order."""
        return replace(
            self, hashes=_choose(self.hashes, index), parents=_choose(self.parents, index), blocks=self.blocks[index]
        )


def _choose(rows: bytes, index: npt.NDArray[np.intp]) -> bytes:
    if len(index) * HASH_BYTES == len(rows):
        return rows
    return np.frombuffer(rows, np.uint8).reshape(-1, HASH_BYTES)[index].tobytes()
