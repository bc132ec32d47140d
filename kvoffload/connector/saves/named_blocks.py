"""Blocks of the engine, and the names under which they are saved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import choose_rows


@dataclass(frozen=True, eq=False)
class NamedBlocks:
    """Blocks of one group with their names. Names are 32 bytes each, one behind the other."""

    group: int
    hashes: bytes
    parents: bytes
    blocks: npt.NDArray[np.int64]
    tenant: str = ""
    """The tenant to which the blocks belong, as the request said."""

    def choose(self, index: npt.NDArray[np.intp]) -> NamedBlocks:
        """Returns the blocks at these indices, in this order."""
        hashes, parents = choose_rows(self.hashes, index), choose_rows(self.parents, index)
        return replace(self, hashes=hashes, parents=parents, blocks=self.blocks[index])
