"""Blocks that subscribers were told a disk has: a few are looked up now and then, so that their end can be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import as_rows
from kvoffload.types import HASH_BYTES

SpaceT = TypeVar("SpaceT")
"""Whatever says whose blocks they are."""
FindThere: TypeAlias = Callable[[int, bytes], npt.NDArray[np.bool_]]
"""Of blocks of a group: which the disk has."""


class _Part(NamedTuple, Generic[SpaceT]):
    space: SpaceT
    group: int
    hashes: bytes
    find: FindThere


class WatchedBlocks(Generic[SpaceT]):
    """Of one domain, on all its disks. Belongs to the thread of the server's core.

    A disk takes whole segments back and remembers no names, so it cannot say what has left it.
    """

    def __init__(self, limit: int) -> None:
        """Watches so many blocks at most."""
        self._limit = limit
        self._parts: deque[_Part[SpaceT]] = deque()
        """The one that is looked up next comes first."""
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def add(self, space: SpaceT, group: int, hashes: bytes, find: FindThere) -> bytes:
        """Watches these, as far as there is room: which ones."""
        hashes = hashes[: max(self._limit - self._blocks, 0) * HASH_BYTES]
        if hashes:
            self._parts.append(_Part(space, group, hashes, find))
            self._blocks += len(hashes) // HASH_BYTES
        return hashes

    def check(self, count: int) -> Iterator[tuple[SpaceT, int, bytes]]:
        """Looks up about so many of them, whose turn it is, and yields those that are there no more."""
        for _ in range(len(self._parts)):
            if count <= 0:
                return
            part = self._parts.popleft()
            rows = as_rows(part.hashes)
            count -= len(rows)
            is_there = part.find(part.group, part.hashes)
            if is_there.any():
                self._parts.append(part._replace(hashes=rows[is_there].tobytes()))
            if not is_there.all():
                self._blocks -= int((~is_there).sum())
                yield part.space, part.group, rows[~is_there].tobytes()
