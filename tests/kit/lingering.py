"""A descriptor that holds up the thread that lets go of it last, for as long as a test likes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

GIVES_UP_S = 60.0
_LINGER_S = 600


class Lingering:
    """A TCP socket that lingers: its last close waits until the other end has taken what was sent to it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._here = socket.create_connection(listener.getsockname())
            self._there, _ = listener.accept()
        self._here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._here.send(bytes(1 << 16))
        self._here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _LINGER_S))
        self.has_held_up = False
        """Whether a test waited so long that the socket was let go without it."""
        self._timer = threading.Timer(GIVES_UP_S, self._give_up)
        self._timer.start()

    def fileno(self) -> int:
        return self._here.fileno()

    def part(self) -> None:
        """Closes this process's own descriptor, once the socket has been sent."""
        self._here.close()

    def let_go(self) -> None:
        """Ends the connection, so that closing the socket takes no time any more. Calling it again has no effect."""
        self._timer.cancel()
        if self._there.fileno() == -1:
            return
        self._there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._there.close()

    def _give_up(self) -> None:
        self.has_held_up = True
        self.let_go()


@contextlib.contextmanager
def lingering() -> Iterator[Lingering]:
    made = Lingering()
    try:
        yield made
        assert not made.has_held_up
    finally:
        made.let_go()
