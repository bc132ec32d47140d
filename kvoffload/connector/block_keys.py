"""Names of blocks: the engine's own chained hashes, one per group and block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.cache import EntryKey
from kvoffload.errors import BlockAlignmentError
from kvoffload.types import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockKeys:
    """Keys for groups whose blocks are whole multiples of what the engine hashes."""

    def __init__(self, *, hash_block_size: int, block_sizes: Sequence[int]) -> None:
        for group, size in enumerate(block_sizes):
            if size % hash_block_size:
                raise BlockAlignmentError(
                    f"group {group}: blocks of {size} tokens are no multiple of the {hash_block_size} tokens of a hash",
                    remedy="enable prefix caching, which aligns the block sizes of hybrid models",
                )
        self._hash_block_size = hash_block_size
        self._hashes_per_block = tuple(size // hash_block_size for size in block_sizes)

    def hashed_tokens(self, request: Request) -> int:
        """Tokens of the request that a hash covers."""
        return len(request.block_hashes) * self._hash_block_size

    def key(self, request: Request, group: int, position: int) -> EntryKey:
        """The key of the group's block at this position: the hash of its last part covers all before it."""
        last = (position + 1) * self._hashes_per_block[group] - 1
        return EntryKey(group, BlockHash(request.block_hashes[last]))
