"""Walks through the blocks in memory from those that are worth most to those that are worth least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.hash_rows import as_rows
from kvoffload.server.tiering.settings import PIECE_BLOCKS, TierSpace, Wants

BANDS = 16
"""Number of parts, of about as many blocks each, in whose order the blocks come. Each is one walk through the index."""
SAMPLE = 64
"""Number of blocks of one step by whose values the bands are chosen: to sort those of a million would take too long."""


class ValueWalk:
    """Iterates over blocks that are wanted, by the eviction policy's values. A step takes about a millisecond, and
    nothing may come of it: then it is None."""

    def __init__(self, cache: LocalCache, spaces: Sequence[TierSpace], wants: Wants, *, part_bytes: int) -> None:
        """`part_bytes` is the most that one step yields, or a single block if that is more."""
        self.count = 0
        """Number of blocks that were wanted when the walk began. It is known after the first walk through the index."""
        self._cache = cache
        self._spaces = spaces
        self._wants = wants
        self._part_bytes = part_bytes
        self._steps = self._walk()

    def __iter__(self) -> Iterator[tuple[TierSpace, StoredBlocks] | None]:
        return self._steps

    def _walk(self) -> Iterator[tuple[TierSpace, StoredBlocks] | None]:
        found = [np.empty(0, np.float64)]
        for _, _, values in self._list():
            found.append(values[:: max(len(values) // SAMPLE, 1)])
            self.count += len(values)
            yield None
        every = np.concatenate(found)
        if not len(every):
            return
        lowest = np.unique(np.quantile(every, np.arange(BANDS) / BANDS, method="lower"))
        # The values of some may have changed since.
        lowest[0] = -np.inf
        above = np.inf
        for least in lowest[::-1]:
            for space, stored, values in self._list():
                chosen = (least <= values) & (values < above)
                yield (space, _choose(stored, chosen)) if chosen.any() else None
            above = least

    def _list(self) -> Iterator[tuple[TierSpace, StoredBlocks, npt.NDArray[np.float64]]]:
        for space in self._spaces:
            largest = max(space.block_bytes(group) for group in range(len(space.rules)))
            limit = min(max(self._part_bytes // max(largest, 1), 1), PIECE_BLOCKS)
            first, is_over = 0, False
            while not is_over:
                listed = self._cache.list_blocks(space.number, first=first, limit=limit)
                first, is_over = listed.next, not listed.next
                groups = np.asarray(listed.groups)
                if not len(groups):
                    yield space, StoredBlocks(0, b"", b""), np.empty(0, np.float64)
                for group in np.unique(groups).tolist():
                    every = StoredBlocks(group, listed.hashes, listed.parents)
                    own = _choose(every, groups == group)
                    wanted = _choose(own, self._wants(own.hashes))
                    yield space, wanted, self._cache.find_values(space.number, group, wanted.hashes)


def _choose(stored: StoredBlocks, chosen: npt.NDArray[np.bool_]) -> StoredBlocks:
    hashes, parents = as_rows(stored.hashes)[chosen], as_rows(stored.parents)[chosen]
    return StoredBlocks(stored.group, hashes.tobytes(), parents.tobytes())
