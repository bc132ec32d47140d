"""Chained hashes of full blocks of tokens, for engines that have none of their own.

A block's hash covers its tokens, its extra keys, and through its parent everything before it. The chain starts at a
root that holds the seed, the block size and what sets a whole request apart (adapter, salt). Only full blocks have a
hash: a partial tail is never keyed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.keys.canonical import encode_canonical
from kvoffload.types import HASH_BYTES, BlockHash

MAX_BLOCK_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """An image, sound or other input whose placeholder tokens are the same for every content.

    `identifier` names the content; `start` and `length` are the placeholders' positions in the request.
    """

    identifier: str
    start: int
    length: int

    def __post_init__(self) -> None:
        if not self.identifier or self.start < 0 or self.length < 1:
            raise ValueError(
                f"media item {self.identifier!r} at {self.start}, length {self.length}: not a stretch of tokens"
            )


class BlockHasher:
    """Hashes requests of one block size and seed. Immutable; any thread may use it."""

    def __init__(self, block_size: int, *, seed: str = "") -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block size {block_size}: allowed is 1 to {MAX_BLOCK_SIZE} tokens")
        self.block_size = block_size
        self._seed = seed

    @property
    def algorithm(self) -> str:
        """Name for the identity: a different algorithm or definition has a different name."""
        return f"kvoffload-{native.HASH_ALGORITHM}-1"

    def root(self, *, adapter: bytes = b"", salt: str = "") -> BlockHash:
        """The parent of a request's first block. `adapter` is `identify_adapter`'s digest, not a name."""
        data = encode_canonical([self.algorithm, self._seed, self.block_size, adapter, salt])
        return BlockHash(hashlib.sha256(b"kvoffload root 1\n" + data).digest())

    def hash_blocks(
        self,
        tokens: Sequence[int] | npt.NDArray[np.unsignedinteger | np.signedinteger],
        *,
        parent: BlockHash,
        position: int = 0,
        media: Sequence[MediaItem] = (),
    ) -> list[BlockHash]:
        """One hash per full block of `tokens`, which follow `parent` and start at `position` of their request.

        `position` must be a multiple of the block size. Raises ValueError for tokens that are not 0 to 2**32 - 1.
        """
        if position % self.block_size or position < 0:
            raise ValueError(f"position {position} is not a multiple of the block size {self.block_size}")
        ids = _as_token_ids(tokens)
        count = len(ids) // self.block_size
        extras, ends = self._media_keys(count, position, media)
        blob = native.hash_blocks(ids[: count * self.block_size], self.block_size, parent, extras, ends)
        return [BlockHash(blob[at : at + HASH_BYTES]) for at in range(0, len(blob), HASH_BYTES)]

    def _media_keys(
        self, count: int, position: int, media: Sequence[MediaItem]
    ) -> tuple[bytes, npt.NDArray[np.uint64] | None]:
        if not media:
            return b"", None
        touched: list[list[list[int | str]]] = [[] for _ in range(count)]
        for item in sorted(media, key=lambda item: (item.start, item.identifier)):
            first = max(0, (item.start - position) // self.block_size)
            last = min(count - 1, (item.start + item.length - 1 - position) // self.block_size)
            for block in range(first, last + 1):
                # Which part of the item lies here matters: the same image can continue from the block before.
                touched[block].append([item.identifier, item.start - position - block * self.block_size])
        keys = [encode_canonical(items) if items else b"" for items in touched]
        return b"".join(keys), np.cumsum([len(key) for key in keys], dtype=np.uint64)


def _as_token_ids(tokens: Sequence[int] | npt.NDArray[np.unsignedinteger | np.signedinteger]) -> npt.NDArray[np.uint32]:
    try:
        wide = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except OverflowError as fault:
        raise ValueError("token ids must be 0 to 2**32 - 1") from fault
    if wide.ndim != 1:
        raise ValueError(f"token ids must be one sequence, not an array of {wide.ndim} dimensions")
    if len(wide) and (wide.min() < 0 or wide.max() > 0xFFFFFFFF):
        raise ValueError("token ids must be 0 to 2**32 - 1")
    return np.ascontiguousarray(wide, dtype=np.uint32)
