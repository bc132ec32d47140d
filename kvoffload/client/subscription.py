"""A process's subscription to events: asked for after every join, and again for as long as the server refuses. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvoffload.client.inventory import Heard, Inventory
from kvoffload.client.lanes import Pending
from kvoffload.client.settings import SECOND_NS
from kvoffload.protocol import Error, EventsLost, NamespaceOpened, ServerMessage, Subscribe, Subscribed
from kvoffload.protocol.message import Event, Request

logger = logging.getLogger(__name__)

PAUSE_NS = SECOND_NS
"""Least time after a refusal before events are asked for again."""


class Subscription:
    """The events of a process, and their inventory. The caller holds the link's lock, and calls `go_on` after each
    change."""

    def __init__(self, on_event: Callable[[Heard, int], None]) -> None:
        """`on_event` hears of events with their numbers, and of all else with number 0."""
        self._on_event = on_event
        self._message: Subscribe | None = None
        """The events that are wanted, or None before the first `start`."""
        self._inventory: Inventory | None = None
        self._own: NamespaceOpened | None = None
        """The process's own namespace, or None for an observer."""
        self._has_inventory = False
        """Whether the server can list its blocks. False without a server, too."""
        self._asked: Pending | None = None
        """The request for events that the server has not answered yet, or None."""
        self._ask_ns: int | None = None
        """Time from which on events are asked for, or None if they are not to be asked for."""
        self._is_told = False
        """Whether the server tells events."""
        self._was_refused = False
        """Whether this server has refused before."""

    def start(self, message: Subscribe, *, with_inventory: bool) -> None:
        """Asks for events, instead of those that were asked for before."""
        self._message = message
        self._inventory = Inventory(self._on_event) if with_inventory else None
        self._ask()

    def join(self, own: NamespaceOpened | None, *, has_inventory: bool, is_again: bool) -> None:
        """A server serves the process now. With `is_again`, another one did before, and events may have been missed."""
        self._own, self._has_inventory = own, has_inventory
        if self._message is not None:
            if is_again:
                self._on_event(EventsLost(count=0), 0)
            self._ask()

    def leave(self) -> None:
        """No server serves the process any more."""
        self._asked = self._ask_ns = None
        self._is_told = self._was_refused = self._has_inventory = False
        if self._inventory is not None:
            self._inventory.stop()

    def hear(self, event: Event, number: int) -> None:
        """Passes on an event. After a loss the inventory begins again."""
        self._on_event(event, number)
        if isinstance(event, EventsLost):
            self.begin_inventory()

    def begin_inventory(self) -> bool:
        """Starts the inventory from its beginning, once the server tells events: without them it would soon be wrong
        without notice. False: there is no inventory."""
        if self._inventory is None or self._message is None or not self._has_inventory:
            return False
        if not self._is_told:
            return True
        name_spaces = self._message.name_spaces
        if not name_spaces and self._own is not None:
            name_spaces = (self._own.name_space,)
            self._on_event(self._own, 0)
        if not name_spaces:
            return False
        self._inventory.begin(name_spaces)
        return True

    def go_on(self, now_ns: int, ask: Callable[[Request], Pending]) -> None:
        """Handles the answers that have come, and asks for what is due. Called now and then, too."""
        if self._asked is not None and self._asked.is_over:
            answer, self._asked = self._asked.answer, None
            self._take(answer, now_ns)
        if self._message is not None and self._ask_ns is not None and now_ns >= self._ask_ns:
            self._ask_ns, self._asked = None, ask(self._message)
        if self._inventory is not None:
            self._inventory.go_on(now_ns, ask)

    def _ask(self) -> None:
        self._asked, self._ask_ns, self._is_told = None, 0, False

    def _take(self, answer: ServerMessage | None, now_ns: int) -> None:
        if isinstance(answer, Subscribed):
            self._is_told = True
            if self._was_refused:
                self._on_event(EventsLost(count=0), 0)
            self.begin_inventory()
            return
        refusal = answer if isinstance(answer, Error) else None
        if not self._was_refused:
            line = "there was no answer" if refusal is None else refusal.message
            logger.warning("the cache server tells no events and is asked again: %s", line)
        self._was_refused = True
        pause_ns = 0 if refusal is None else refusal.retry_after_ms * 1_000_000
        self._ask_ns = now_ns + max(pause_ns, PAUSE_NS)
