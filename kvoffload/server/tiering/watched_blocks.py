"""Watches blocks that subscribers were told a disk has: looks up a few of them at a time, so that their end can be
told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import as_rows
from kvoffload.types import HASH_BYTES

SpaceT = TypeVar("SpaceT")
"""The key that tells to which namespace blocks belong."""
FindThere: TypeAlias = Callable[[int, bytes], npt.NDArray[np.bool_]]
"""Returns which of a group's blocks the disk has."""
PART_BLOCKS = 1024
"""Number of blocks of one disk, space and group that are looked up in one call."""
CALL_BLOCKS = 64
"""Cost of a call in addition to its blocks, as a number of blocks that could be looked up in that time."""


@dataclass(kw_only=True, eq=False)
class _Part(Generic[SpaceT]):
    space: SpaceT
    group: int
    find: FindThere
    hashes: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES


class WatchedBlocks(Generic[SpaceT]):
    """The watched blocks of one domain, on all its disks. Belongs to the thread of the server's core.

    A disk takes whole segments back and remembers no names, so it cannot say what has left it.
    """

    def __init__(self, limit: int) -> None:
        """Watches at most `limit` blocks."""
        self._limit = limit
        self._parts: deque[_Part[SpaceT]] = deque()
        """All parts. The one that is looked up next comes first."""
        self._open: dict[tuple[SpaceT, int, FindThere], _Part[SpaceT]] = {}
        """Parts to which blocks are still added, as engines save block by block."""
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    @property
    def part_count(self) -> int:
        """Number of calls that look up all of them."""
        return len(self._parts)

    def add(self, space: SpaceT, group: int, hashes: bytes, find: FindThere) -> bytes:
        """Watches these blocks as far as there is room, and returns those that it watches. Blocks with the same space,
        group and `find` are looked up together."""
        hashes = hashes[: max(self._limit - self._blocks, 0) * HASH_BYTES]
        at = 0
        while at < len(hashes):
            part = self._open.get((space, group, find))
            if part is None or len(part) >= PART_BLOCKS:
                part = self._open[space, group, find] = _Part(space=space, group=group, find=find)
                self._parts.append(part)
            end = at + (PART_BLOCKS - len(part)) * HASH_BYTES
            part.hashes += hashes[at:end]
            at = end
        self._blocks += len(hashes) // HASH_BYTES
        return hashes

    def check(self, count: int) -> Iterator[tuple[SpaceT, int, bytes]]:
        """Looks up the blocks whose turn it is, in about the time that a single look-up of `count` blocks takes, and
        yields those that are no longer there."""
        for _ in range(len(self._parts)):
            if count <= 0:
                return
            part = self._parts[0]
            # Moved on before it is looked up, so that a disk that fails does not hold up others.
            self._parts.rotate(-1)
            hashes = bytes(part.hashes)
            rows = as_rows(hashes)
            count -= len(rows) + CALL_BLOCKS
            is_there = part.find(part.group, hashes)
            if is_there.all():
                continue
            part.hashes[:] = rows[is_there].tobytes()
            self._blocks -= int((~is_there).sum())
            if not part.hashes:
                self._parts.pop()
                self._close(part)
            yield part.space, part.group, rows[~is_there].tobytes()

    def forget(self, is_forgotten: Callable[[SpaceT], bool]) -> None:
        """Stops watching the blocks of these spaces."""
        kept = deque(part for part in self._parts if not is_forgotten(part.space))
        for part in self._parts:
            if is_forgotten(part.space):
                self._blocks -= len(part)
                self._close(part)
        self._parts = kept

    def _close(self, part: _Part[SpaceT]) -> None:
        key = (part.space, part.group, part.find)
        if self._open.get(key) is part:
            del self._open[key]
