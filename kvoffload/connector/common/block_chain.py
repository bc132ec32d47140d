"""A request's block hashes as one buffer, and the names of its blocks in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.connector.common.group_table import GroupTable
from kvoffload.hash_rows import as_rows
from kvoffload.types import HASH_BYTES

NO_MASK = bytes(HASH_BYTES)
_NO_PARENT = bytes(HASH_BYTES)


class BlockChain:
    """The engine's chained hashes, each changed by the same mask: blocks saved under one mask are never found under
    another. Owned by the scheduler's thread."""

    def __init__(self, groups: GroupTable, mask: bytes = NO_MASK) -> None:
        self._groups = groups
        self.mask = mask
        self._count = 0
        self.data = b""

    @property
    def tokens(self) -> int:
        """Number of tokens that the hashes cover."""
        return self._count * self._groups.hash_block_size

    def follow(self, hashes: Sequence[bytes]) -> None:
        """Takes the hashes that the engine has added since the last call."""
        count = len(hashes)
        if count == self._count:
            return
        if count < self._count:
            self.data, self._count = b"", 0
        new = b"".join(hashes[self._count :])
        if len(new) != (count - self._count) * HASH_BYTES:
            new = b"".join(fill_hash(name) for name in hashes[self._count :])
        if self.mask != NO_MASK:
            mask = np.frombuffer(self.mask, np.uint8)
            new = (as_rows(new) ^ mask).tobytes()
        self.data += new
        self._count = count

    def names(self, group: int, positions: range) -> bytes:
        """Returns the names of the group's blocks there: the hash of a block's last part covers all before it."""
        return self._pick(self._groups.hashes_per_block[group], positions)

    def before(self, group: int, position: int) -> bytes:
        """Returns the name of the group's block before this one; zeros before the first."""
        end = position * self._groups.hashes_per_block[group] * HASH_BYTES
        return self.data[end - HASH_BYTES : end] if end else _NO_PARENT

    def parents(self, group: int, positions: range) -> bytes:
        """Returns the block before each; for a window or a state, the first prefix group's block that ends with it."""
        per_block, prefix = self._groups.hashes_per_block[group], self._groups.first_prefix
        if group in self._groups.prefixes or prefix is None:
            if positions.start == 0 and len(positions):
                return _NO_PARENT + self._pick(per_block, range(positions.stop - 1))
            return self._pick(per_block, range(positions.start - 1, positions.stop - 1))
        per_parent = self._groups.hashes_per_block[prefix]
        if per_block % per_parent == 0:
            return self._pick(per_block, positions)
        ends = [(position + 1) * per_block for position in positions]
        return b"".join(
            _NO_PARENT if end % per_parent else self.data[(end - 1) * HASH_BYTES : end * HASH_BYTES] for end in ends
        )

    def _pick(self, per_block: int, positions: range) -> bytes:
        if per_block == 1:
            return self.data[positions.start * HASH_BYTES : positions.stop * HASH_BYTES]
        rows = as_rows(self.data)
        return rows[(positions.start + 1) * per_block - 1 : positions.stop * per_block : per_block].tobytes()


def combine_masks(one: bytes, other: bytes) -> bytes:
    """Returns one mask for two reasons to keep names apart."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(HASH_BYTES, "big")


def fill_hash(name: bytes) -> bytes:
    """Pads or cuts a hash to the length of names. Shorter hashes come from algorithms whose names no engines share."""
    return name if len(name) == HASH_BYTES else name.ljust(HASH_BYTES, b"\0")[:HASH_BYTES]
