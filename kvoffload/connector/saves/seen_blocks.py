"""Blocks that were computed once, for saving at the second use: most blocks of most prompts never come again."""

from __future__ import annotations


class SeenBlocks:
    """Owned by the scheduler's thread. Remembers between `limit` / 2 and `limit` of the blocks that it saw last.

    Two generations: when the current one holds half of the limit, the one before it is forgotten. Whoever is forgotten
    counts as new again. Blocks and users are 64-bit numbers here; two blocks that share one are saved a use too early,
    two users a use too late, no more.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 2, "each generation remembers something"
        self._half = limit // 2
        self._current: dict[int, int] = {}
        """By block: its first user."""
        self._previous: dict[int, int] = {}

    def __len__(self) -> int:
        """At most `limit`; a block that was seen in both generations counts twice."""
        return len(self._current) + len(self._previous)

    def see(self, group: int, block_hash: bytes, user: str) -> bool:
        """Whether somebody else used it before. From now on it was used."""
        block, number = hash((group, block_hash)), hash(user)
        first = self._current.get(block)
        if first is None:
            first = self._previous.get(block, number)
            if len(self._current) == self._half:
                self._previous, self._current = self._current, {}
            # Also what was known: what is used goes on being remembered.
            self._current[block] = first
        return first != number

    def forget_all(self) -> None:
        """The cache was cleared: nothing of what was seen is of use any more."""
        self._current.clear()
        self._previous.clear()
