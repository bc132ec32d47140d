"""One-way messages of which nobody knows yet whether the server has had them. Pure.

A server serves a connection's messages in order. So an answer to a request says that all one-way messages sent before
it were served; what is left when a connection is lost is sent again on the next one, where it does no harm twice:
tickets and leases are void once they were used.
"""

from __future__ import annotations

from collections import deque

from kvoffload.protocol.message import OneWay

MAX_MESSAGES = 1024
MARK_AFTER = 256


class OneWayLog:
    """At its bound the oldest is forgotten: what it was to give back stays the session's until the engine ends."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, OneWay]] = deque()
        """With the number of the last request that was sent before it."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def needs_mark(self) -> bool:
        """Whether a request should follow, for its answer."""
        return len(self._entries) >= MARK_AFTER

    def add(self, message: OneWay, last_request: int) -> None:
        if len(self._entries) >= MAX_MESSAGES:
            self._entries.popleft()
        self._entries.append((last_request, message))

    def confirm(self, answered: int) -> None:
        """The request of this number was answered."""
        while self._entries and self._entries[0][0] < answered:
            self._entries.popleft()

    def take_all(self) -> list[OneWay]:
        """To be sent once more, in this order."""
        messages = [message for _, message in self._entries]
        self._entries.clear()
        return messages
