"""Source blocks that the engine must not give away while they are being saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.connector.engine.vllm_compat import free_first

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockPins:
    """Reference counts in the engine's block pool. Owned by the scheduler's thread.

    A pin keeps a block from being allocated again; it does not keep its owner from writing to it. So only blocks that
    are full, or were handed off by the engine, may be pinned. A pinned block also keeps the engine's prefix cache from
    being reset, and holds memory that requests may be waiting for: pins are few (`limit`) and short.
    """

    def __init__(self, pool: BlockPool, *, limit: int) -> None:
        self._pool = pool
        self.limit = limit
        self._pinned = 0

    @property
    def count(self) -> int:
        """Number of pins held now. A block pinned twice counts twice."""
        return self._pinned

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self.limit - self._pinned

    def holds_alone(self, block_ids: Sequence[int]) -> bool:
        """Whether one of these pinned blocks has no other user, and so comes free when it is unpinned."""
        return any(block.ref_cnt == 1 for block in self._find(block_ids))

    def pin(self, block_ids: Sequence[int]) -> None:
        """Pins these blocks. The caller has asked for `room`, and unpins exactly these blocks later."""
        assert len(block_ids) <= self.room
        self._pool.touch(self._find(block_ids))
        self._pinned += len(block_ids)

    def unpin(self, block_ids: Sequence[int], *, is_next: bool = False) -> None:
        """Unpins the deepest block first, so that the engine evicts children before parents. With `is_next` the blocks
        without other users go to the head of its queue, in the given order: it was about to take them when they were
        pinned."""
        if is_next:
            free_first(self._pool, self._find(block_ids))
        else:
            self._pool.free_blocks(self._find(block_ids[::-1]))
        self._pinned -= len(block_ids)
        assert self._pinned >= 0

    def _find(self, block_ids: Sequence[int]) -> list[KVCacheBlock]:
        return list(map(self._pool.blocks.__getitem__, block_ids))
