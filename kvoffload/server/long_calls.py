"""Runs calls that would hold up the event loop on a thread of their own. Users take turns, and connections wait.

A call that does its work in parts goes to the end of its user's line after each of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import cast

from kvoffload.server.common.steps import FoundLater, Unfinished
from kvoffload.server.common.turns import Turns
from kvoffload.server.common.worker_thread import start_worker
from kvoffload.server.sessions.outbox import Later


class LongCalls:
    """Belongs to the thread of the event loop, which watches `fileno` and then calls `take_done`.

    A connection's messages are served in order, so nothing more is taken from it until its call is done.
    """

    def __init__(self) -> None:
        """Starts the thread that runs all calls. ConfigError: it cannot be started."""
        self._pool = start_worker("kvoffload-long")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._busy: set[bytes] = set()
        """Connections whose call is running, or waits for its turn."""
        self._lines = Turns[Later]()
        """Calls that wait for their turn."""
        self._running: tuple[Hashable, Later, Future[FoundLater | Unfinished]] | None = None
        """The user whose call is running, the call, and what comes of it."""

    def __len__(self) -> int:
        """Number of connections that have a long call."""
        return len(self._busy)

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a call is done."""
        return self._wake

    def start(self, later: Later, *, owner: int = 0) -> None:
        """Starts a call, or queues it until its user's turn. The connection must have no other long call."""
        assert later.connection not in self._busy
        self._busy.add(later.connection)
        self._lines.add(owner, later)
        if self._running is None:
            self._run_next()

    def is_busy(self, connection: bytes) -> bool:
        return connection in self._busy

    def take_done(self) -> Iterator[tuple[Later, Future[FoundLater]]]:
        """Yields the call that is done, if any. Its connection has no call any more, and the next call is started."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._running is None or not self._running[2].done():
            return
        owner, later, found = self._running
        if _has_more(found):
            self._lines.add(owner, later)
            self._run_next()
            return
        self._run_next()
        self._busy.remove(later.connection)
        yield later, cast("Future[FoundLater]", found)

    def close(self) -> None:
        """Runs all calls that were started, and waits for them; of those in parts, one more part. Calling it again has
        no effect."""
        while self._lines:
            self._run_next()
        self._pool.shutdown()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _run_next(self) -> None:
        self._running = None
        if not self._lines:
            return
        owner, later = self._lines.take()
        found = self._pool.submit(later.find)
        self._running = owner, later, found
        found.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))


def _has_more(found: Future[FoundLater | Unfinished]) -> bool:
    return found.exception() is None and isinstance(found.result(), Unfinished)
