"""Calls that would hold up the loop, on a thread beside it, one of each user in turn. Their connections wait."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvoffload.server.outbox import FoundLater, Later
from kvoffload.server.shares import has_share
from kvoffload.units import MIB

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 * MIB
"""In frames of one connection behind its long call."""
ALL_WAITING_BYTES = 4 * MAX_WAITING_BYTES
"""Of all; no user gets all of it."""


class LongCalls:
    """Belongs to the thread of the event loop, which watches `fileno` and then takes what is done.

    A connection's messages are served in order: what comes behind a long call waits here until that is done.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvoffload-long")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._busy: set[bytes] = set()
        """Connections whose call is under way, or has its turn later."""
        self._lines: dict[int, deque[Later]] = {}
        """Calls whose turn comes later, by user; that of the first user comes next."""
        self._running: tuple[Later, Future[FoundLater]] | None = None
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._owners: dict[bytes, int] = {}
        self._bytes: Counter[int] = Counter()
        """By user."""

    def __len__(self) -> int:
        """Connections that have one."""
        return len(self._busy)

    @property
    def waiting(self) -> int:
        """Connections of which something is kept that came behind."""
        return len(self._waiting)

    def fileno(self) -> int:
        """Readable when one is done."""
        return self._wake

    def start(self, later: Later, *, owner: int = 0) -> None:
        """Its connection has none yet."""
        assert later.connection not in self._busy
        self._busy.add(later.connection)
        self._lines.setdefault(owner, deque()).append(later)
        if self._running is None:
            self._run_next()

    def is_busy(self, connection: bytes) -> bool:
        return connection in self._busy

    def wait(self, connection: bytes, frame: bytes, *, owner: int = 0) -> bool:
        """Keeps a frame that came behind. False: there are too many of the connection, or of its owner."""
        waiting = self._waiting.setdefault(connection, deque())
        owner = self._owners.setdefault(connection, owner)
        if len(waiting) >= MAX_WAITING or sum(map(len, waiting)) + len(frame) > MAX_WAITING_BYTES:
            return False
        if not has_share(self._bytes[owner], total=self._bytes.total() + len(frame) - 1, limit=ALL_WAITING_BYTES):
            return False
        self._bytes[owner] += len(frame)
        waiting.append(frame)
        return True

    def take_done(self) -> Iterator[tuple[Later, Future[FoundLater]]]:
        """Yields what is done: its connection has no call any more, and the next call has its turn."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._running is not None and self._running[1].done():
            later, found = self._running
            self._run_next()
            self._busy.remove(later.connection)
            yield later, found

    def take_waiting(self, connection: bytes) -> bytes | None:
        """The next frame that came behind; None: there is none, or it waits for the next call."""
        waiting = self._waiting.get(connection)
        if not waiting:
            self._waiting.pop(connection, None)
            self._owners.pop(connection, None)
            return None
        if connection in self._busy:
            return None
        frame = waiting.popleft()
        self._bytes[self._owners[connection]] -= len(frame)
        # Who has nothing here costs nothing.
        self._bytes += Counter()
        return frame

    def close(self) -> None:
        """Waits for all that was started. Once more does nothing."""
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
        owner, line = next(iter(self._lines.items()))
        later = line.popleft()
        # To the end of the line of users.
        del self._lines[owner]
        if line:
            self._lines[owner] = line
        found = self._pool.submit(later.find)
        self._running = later, found
        found.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))
