"""Notes each update of an engine's weights where it begins."""

from __future__ import annotations

import functools
import threading
from typing import Any
from weakref import WeakSet

SELECT = "_select_runners"
"""The method of SGLang's that whatever changes weights calls first; `tested` makes sure of that."""
CHECK = "check_weights"
"""The method that calls it, too, and changes nothing by most of its actions."""
READING_ACTIONS = frozenset({"checksum", "compare", "snapshot"})
"""These actions of `CHECK` only read; another one makes the weights random."""


class WeightUpdates:
    """The engine's scheduler writes to it, any thread reads."""

    def __init__(self) -> None:
        self.count = 0
        """Updates that were begun; each may have changed any weight."""
        self.is_reading = False
        """The updater's thread selects runners only to look at their weights."""
        self._updater: Any = None
        self._threads: WeakSet[threading.Thread] = WeakSet()

    def note(self, updater: Any = None) -> None:
        """Notes that the weights are about to change, or have. The count is raised last: a thread that reads it and
        began later sees a count that includes this update."""
        self._updater = updater or self._updater
        self._threads = WeakSet(threading.enumerate())
        self.count += 1

    @property
    def is_open(self) -> bool:
        """Whether a session of updates is open, in which the weights may be written at any moment without a further
        call."""
        session = getattr(self._updater, "_session", None)
        return session is not None and not session.loaded_weights

    @property
    def is_of_later_thread(self) -> bool:
        """Whether the calling thread began after the last update did."""
        return threading.current_thread() not in self._threads


@functools.cache
def watch_updates(kind: Any) -> WeightUpdates:
    """`kind`: SGLang's class that updates weights. Its updates are noted from here on, before anything changes."""
    updates, select, check = WeightUpdates(), getattr(kind, SELECT), getattr(kind, CHECK)

    @functools.wraps(select)
    def note_and_select(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not updates.is_reading:
            updates.note(self)
        return select(self, *args, **kwargs)

    @functools.wraps(check)
    def check_unnoted(self: Any, recv_req: Any) -> Any:
        updates.is_reading = recv_req.action in READING_ACTIONS
        try:
            return check(self, recv_req)
        finally:
            updates.is_reading = False

    setattr(kind, SELECT, note_and_select)
    setattr(kind, CHECK, check_unnoted)
    return updates
