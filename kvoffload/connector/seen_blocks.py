"""Blocks that were computed once, for saving at the second use: most blocks of most prompts never come again."""

from __future__ import annotations


class SeenBlocks:
    """Owned by the scheduler's thread. Remembers between `limit` / 2 and `limit` of the blocks that it saw last.

    Two generations: when the current one holds half of the limit, the one before it is forgotten. Whoever is forgotten
    counts as new again. A block is a 64-bit number here; two that share one are saved a use too early, no more.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 2, "each generation remembers something"
        self._half = limit // 2
        self._current: set[int] = set()
        self._previous: set[int] = set()

    def __len__(self) -> int:
        """At most `limit`; a block that was seen in both generations counts twice."""
        return len(self._current) + len(self._previous)

    def see(self, group: int, block_hash: bytes) -> bool:
        """Whether it was seen before. From now on it was."""
        block = hash((group, block_hash))
        if block in self._current:
            return True
        was_seen = block in self._previous
        if len(self._current) == self._half:
            self._previous, self._current = self._current, set()
        # Also what was known: what is used goes on being remembered.
        self._current.add(block)
        return was_seen

    def forget_all(self) -> None:
        """The cache was cleared: nothing of what was seen is of use any more."""
        self._current.clear()
        self._previous.clear()
