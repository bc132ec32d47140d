"""Notes in memory which blocks tiers have, too, so that eviction prefers them: there is less to lose."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvoffload.cache import LocalCache
from kvoffload.hash_rows import as_rows
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.server.tiering.traffic import TierTraffic

SWEPT_BLOCKS = 4096
"""Number of blocks that one call looks up: a few milliseconds of the core's thread."""


class TierNotes:
    """Looks at what memory holds, part by part. Belongs to the thread of the server's core.

    Blocks are noted as they are written and as they come up. A disk takes whole segments back and remembers no names,
    so nothing but a look finds what it has no more. Of a place to which others write, too, what it was given counts as
    there.
    """

    def __init__(self, tiers: Sequence[TierTraffic]) -> None:
        self._tiers = tiers
        self._left: deque[TierSpace] = deque()
        """Identities still to look at in this round; of the first one, its blocks from `_first` on."""
        self._first = 0

    def sweep(self, cache: LocalCache) -> None:
        """Looks up the next part of the blocks in memory, if all tiers know what they have."""
        if not all(tier.knows_all for tier in self._tiers):
            return
        if not self._left:
            # To look for an identity takes a way through the whole index.
            used = cache.used_by_each()
            self._left.extend(space for space in self._tiers[0].spaces if used.get(space.number))
        if not self._left:
            return
        space = self._left[0]
        listed = cache.list_blocks(space.number, first=self._first, limit=SWEPT_BLOCKS)
        rows = as_rows(listed.hashes)
        for group in np.unique(listed.groups):
            hashes = rows[listed.groups == group].tobytes()
            there = np.logical_or.reduce([tier.find_there(space, int(group), hashes) for tier in self._tiers])
            cache.leave_tier_notes(space.number, int(group), hashes, there)
        self._first = listed.next
        if not self._first:
            self._left.popleft()
