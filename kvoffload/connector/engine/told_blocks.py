"""What whoever hears our events knows of the blocks that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    def has_room(self) -> bool:
        """Whether another block may be told."""
        return len(self.told) + len(self.stale) < MAX_TOLD

    def hold(self, key: tuple[int, bytes], parent: bytes) -> None:
        """A block is not told before the one ahead of it. Those beyond MAX_TOLD are never told."""
        if len(self.told) + len(self.stale) + len(self.awaited) < MAX_TOLD:
            self.release(key)
            self.held.setdefault((key[0], parent), {})[key[1]] = None
            self.awaited[key] = parent

    def release(self, key: tuple[int, bytes]) -> None:
        """A block is told, or there no more."""
        parent = self.awaited.pop(key, None)
        if parent is not None:
            self._let_go(key, parent)

    def release_some(self, count: int) -> bool:
        """Forgets so many of those that are held. False: there are no more."""
        for _ in range(min(count, len(self.awaited))):
            self._let_go(*self.awaited.popitem())
        return bool(self.awaited)

    def walk_held(self, group: int, names: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The blocks held for these and for each other, each with the one before it: those of a prompt in a row. What
        has come may be released."""
        todo = [(name, parent) for parent in names for name in self.held.get((group, parent), ())][::-1]
        while todo:
            name, parent = todo.pop()
            todo.extend((after, name) for after in self.held.get((group, name), ()))
            yield name, parent

    def _let_go(self, key: tuple[int, bytes], parent: bytes) -> None:
        siblings = self.held[key[0], parent]
        del siblings[key[1]]
        if not siblings:
            del self.held[key[0], parent]
