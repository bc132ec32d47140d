"""Whether somebody wants to leave: a terminal that gives each key at once, and is given back as it was."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

QUIT = (b"q", b"Q", b"\x04", b"\x1b")
"""Escape and the end of input too; what interrupts is a signal."""


class Keyboard:
    """Of standard input; nobody is there if that is no terminal."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1

    @contextlib.contextmanager
    def listening(self) -> Iterator[Keyboard]:
        if self._file < 0:
            yield self
            return
        before = termios.tcgetattr(self._file)
        try:
            tty.setcbreak(self._file)
            yield self
        finally:
            termios.tcsetattr(self._file, termios.TCSADRAIN, before)

    def wants_to_leave(self, wait_s: float) -> bool:
        """Waits that long for a key at most; other keys end the wait, too."""
        ready, _, _ = select.select([self._file] if self._file >= 0 else [], [], [], wait_s)
        return bool(ready) and os.read(self._file, 64)[:1] in (*QUIT, b"")
