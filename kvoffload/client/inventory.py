"""The inventory for a subscriber: blocks that were there before, from a server's listing, read a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvoffload.client.lanes import Pending
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import BlocksListed, Error, ErrorCode, ListBlocks, Medium, Stored
from kvoffload.protocol.message import Event

PAUSE_NS = 1_000_000_000
"""Least time between the beginnings of two inventories. A subscriber that loses events all the time should still hear
some of them."""
RETRY_NS = 250_000_000


@dataclass(frozen=True)
class InventoryBegun:
    """All that is there is told from here on, among the events of what changes meanwhile."""


@dataclass(frozen=True)
class InventoryEnded:
    """The blocks told since the beginning are all that is known to be there."""


Heard: TypeAlias = Event | InventoryBegun | InventoryEnded


class Inventory:
    """The inventory of one subscription, which can be repeated. The caller holds the link's lock."""

    def __init__(self, hear: Callable[[Heard, int], None]) -> None:
        """Calls `hear` with number 0 for each thing it tells."""
        self._hear = hear
        self._wanted: tuple[int, ...] | None = None
        self._left: list[int] = []
        """Namespaces that are not told completely, the present one last."""
        self._first = 0
        self._asked: Pending | None = None
        self._begin_ns = self._retry_ns = 0
        """Times before which no inventory begins, and nothing is asked."""

    def begin(self, name_spaces: Sequence[int]) -> None:
        """Requests an inventory of all these namespaces from the beginning, whatever was told of them before."""
        self._wanted = tuple(name_spaces)
        self._left, self._asked = [], None

    def stop(self) -> None:
        """Drops the inventory under way and any that was requested."""
        self._wanted, self._left, self._asked = None, [], None

    def go_on(self, now_ns: int, ask: Callable[[ListBlocks], Pending]) -> None:
        """Passes on the blocks of the last answer and asks for more. Call it after each answer, and now and then."""
        if self._asked is not None:
            if not self._asked.is_over:
                return
            answer, self._asked = self._asked.answer, None
            self._take(answer, now_ns)
        if self._wanted is not None and now_ns >= self._begin_ns:
            self._left, self._first, self._wanted = list(reversed(self._wanted)), 0, None
            self._begin_ns = now_ns + PAUSE_NS
            self._hear(InventoryBegun(), 0)
            if not self._left:
                self._hear(InventoryEnded(), 0)
        if self._left and now_ns >= self._retry_ns:
            self._asked = ask(ListBlocks(name_space=self._left[-1], first=self._first))

    def _take(self, answer: object, now_ns: int) -> None:
        if isinstance(answer, BlocksListed):
            self._tell(answer)
            self._first = answer.next
            if answer.next:
                return
        elif not (isinstance(answer, Error) and answer.code is ErrorCode.NOT_FOUND):
            self._retry_ns = now_ns + RETRY_NS
            return
        self._left.pop()
        self._first = 0
        if not self._left:
            self._hear(InventoryEnded(), 0)

    def _tell(self, listed: BlocksListed) -> None:
        groups = np.frombuffer(listed.groups, "<u8")
        hashes, parents = as_rows(listed.hashes), as_rows(listed.parents)
        for group in np.unique(groups).tolist():
            chosen = groups == group
            event = Stored(
                name_space=self._left[-1],
                medium=Medium.MEMORY,
                group=group,
                hashes=hashes[chosen].tobytes(),
                parents=parents[chosen].tobytes(),
            )
            self._hear(event, 0)
