"""The blocks that were reported in events, and are known to the routers that listen to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvoffload.connector.engine.loadable import LoadableBlocks

MAX_TOLD = 1 << 20
"""Maximum number of blocks in one medium that listeners know from events. Further blocks are not reported."""


@dataclass(eq=False)
class Picture:
    """The blocks in one medium, as a listener knows them who has heard all events."""

    constants: list[dict[str, Any]]
    """Fields that are the same in all events of a group, by group."""
    loadable: LoadableBlocks | None
    told: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    """Reported blocks, by the first group of their table and name, each with whether its tokens were reported."""
    stale: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    """Blocks that were reported earlier and have not come in the present inventory so far; like `told`."""
    held: dict[tuple[int, bytes], dict[bytes, None]] = field(default_factory=dict)
    """The names of stored blocks that are not reported, because the block before them is not, by group and name of that
    block: routers drop blocks that follow one that they do not know."""
    awaited: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """The name of the block before each held one, by the held block's group and name."""
    masks: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """The masks of reported blocks that have another mask than most, by group and name, the oldest first."""

    @property
    def has_room(self) -> bool:
        """Whether another block may be reported."""
        return len(self.told) + len(self.stale) < MAX_TOLD

    def hold(self, key: tuple[int, bytes], parent: bytes) -> None:
        """Holds a block until the one before it is reported. Blocks beyond MAX_TOLD are never reported."""
        if len(self.told) + len(self.stale) + len(self.awaited) < MAX_TOLD:
            self.release(key)
            self.held.setdefault((key[0], parent), {})[key[1]] = None
            self.awaited[key] = parent

    def release(self, key: tuple[int, bytes]) -> None:
        """Holds a block no longer: it is reported now, or gone."""
        parent = self.awaited.pop(key, None)
        if parent is not None:
            self._let_go(key, parent)

    def release_some(self, count: int) -> bool:
        """Forgets up to `count` of the held blocks. Returns whether more are left."""
        for _ in range(min(count, len(self.awaited))):
            self._let_go(*self.awaited.popitem())
        return bool(self.awaited)

    def walk_held(self, group: int, names: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yields the blocks held for these and for each other, each with the one before it, and the blocks of a prompt
        in a row. The caller may release a block once it was yielded."""
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
