"""What whoever hears our events knows of the blocks that are there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvoffload.connector.engine.loadable import LoadableBlocks

MAX_TOLD = 1 << 20
"""Blocks that are known to be there by whoever hears what is told. Those beyond are not told."""


@dataclass(eq=False)
class Picture:
    """What whoever hears all that is told knows of one medium."""

    constants: list[dict[str, Any]]
    """By group: what all its events say."""
    loadable: LoadableBlocks | None
    told: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    """Blocks that are known to be there, by the first group of their table and name, and whether that was told with
    tokens."""
    stale: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    """Likewise: those that the present inventory has not told so far."""
    held: dict[tuple[int, bytes], dict[bytes, None]] = field(default_factory=dict)
    """The names of blocks that are there and not told, by the group and name of the one before them, which nobody
    knows: routers drop what goes on from a block that they do not know."""
    awaited: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """By group and name of such a block: the name of the one before it."""
    masks: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """Over the names of blocks that were told under another mask than others have, by group and name, the oldest
    first."""

    @property
    def is_full(self) -> bool:
        """Nothing else is kept track of."""
        return len(self.told) + len(self.stale) + len(self.awaited) >= MAX_TOLD

    def hold(self, key: tuple[int, bytes], parent: bytes) -> None:
        """A block is not told before the one ahead of it."""
        if not self.is_full:
            self.release(key)
            self.held.setdefault((key[0], parent), {})[key[1]] = None
            self.awaited[key] = parent

    def release(self, key: tuple[int, bytes]) -> None:
        """A block is told, or there no more."""
        parent = self.awaited.pop(key, None)
        if parent is not None:
            siblings = self.held[key[0], parent]
            del siblings[key[1]]
            if not siblings:
                del self.held[key[0], parent]

    def list_held(self, group: int, names: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The blocks held for these and for each other, and the one before each: those of a prompt in a row."""
        found, parents = [], []
        todo = [(name, parent) for parent in names for name in self.held.get((group, parent), ())][::-1]
        while todo:
            name, parent = todo.pop()
            found.append(name)
            parents.append(parent)
            todo.extend((after, name) for after in self.held.get((group, name), ()))
        return found, parents
