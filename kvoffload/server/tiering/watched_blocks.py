"""Blocks that subscribers were told a disk has: a few are looked up now and then, so that their end can be told."""

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
"""Whatever says whose blocks they are."""
FindThere: TypeAlias = Callable[[int, bytes], npt.NDArray[np.bool_]]
"""Of blocks of a group: which the disk has."""
PART_BLOCKS = 1024
"""Of one disk, space and group, that are looked up in one call."""
CALL_BLOCKS = 64
"""Blocks that could be looked up in the time that a call takes besides."""


@dataclass(kw_only=True, eq=False)
class _Part(Generic[SpaceT]):
    space: SpaceT
    group: int
    find: FindThere
    hashes: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES


class WatchedBlocks(Generic[SpaceT]):
    """Of one domain, on all its disks. Belongs to the thread of the server's core.

    A disk takes whole segments back and remembers no names, so it cannot say what has left it.
    """

    def __init__(self, limit: int) -> None:
        """Watches so many blocks at most."""
        self._limit = limit
        self._parts: deque[_Part[SpaceT]] = deque()
        """The one that is looked up next comes first."""
        self._open: dict[tuple[SpaceT, int, FindThere], _Part[SpaceT]] = {}
        """Of them, those that more is added to: engines save block by block."""
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    @property
    def part_count(self) -> int:
        """How many calls look all of them up."""
        return len(self._parts)

    def add(self, space: SpaceT, group: int, hashes: bytes, find: FindThere) -> bytes:
        """Watches these, as far as there is room: which ones. Those with the same space, group and `find` are looked up
        together."""
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
        """Looks up those whose turn it is, in about the time that so many of one call take, and yields those that are
        there no more."""
        for _ in range(len(self._parts)):
            if count <= 0:
                return
            part = self._parts[0]
            # Before it is looked up, so that a disk that fails holds up no others.
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
        """Blocks of these spaces are watched no more."""
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
