"""Reads from a terminal whether the user wants to leave: it gives each key at once, and its settings are restored at
the end.

An interrupt is a wish to leave and no exception: that could come anywhere, with a lock held.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator

QUIT = (b"q", b"Q", b"\x04", b"\x1b")
"""Escape and the end of input too."""


class Keyboard:
    """Reads keys of standard input; there are none if that is no terminal. Used by the main thread."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._is_interrupted = False
        self._wake = -1
        """Readable when it is."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[Keyboard]:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        former = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        before = termios.tcgetattr(self._file) if self._file >= 0 else None
        try:
            if before is not None:
                tty.setcbreak(self._file)
            yield self
        finally:
            if before is not None:
                termios.tcsetattr(self._file, termios.TCSADRAIN, before)
            signal.signal(signal.SIGINT, former)
            os.close(self._wake)

    def wants_to_leave(self, wait_s: float) -> bool:
        """Waits that long for a key at most; other keys end the wait, too."""
        ready, _, _ = select.select([self._wake, *([self._file] if self._file >= 0 else [])], [], [], wait_s)
        if self._is_interrupted:
            return True
        return self._file in ready and os.read(self._file, 64)[:1] in (*QUIT, b"")

    def _interrupt(self) -> None:
        self._is_interrupted = True
        os.eventfd_write(self._wake, 1)
