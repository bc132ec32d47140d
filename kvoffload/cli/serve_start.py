"""`kvoffload serve` tells on a terminal how far its memory is while it starts, and once that it is ready."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import typer

from kvoffload.units import describe_size

if TYPE_CHECKING:
    from kvoffload.server.loop import CacheServer

STALLED_S = 5.0
"""A bar that has not moved for so long goes: memory is short, and the log says so."""


class StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error then, so that lines go above a bar that is shown."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Changes nothing: standard error is what is written to."""


class StartTeller:
    """Belongs to the thread of the server's loop, which calls `look` after each of its turns."""

    def __init__(
        self, server: CacheServer, *, memory_bytes: int, notify: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins to tell. `notify`: where systemd wants to hear that the server is ready; empty: nowhere."""
        self._server = server
        self._memory_bytes = memory_bytes
        self._notify = notify
        self._clock = clock
        self._is_ready = False
        self._is_over = False
        self._ready_bytes = -1
        self._moved_s = clock()
        self._bar: Any = None

    def look(self) -> None:
        """Reports changes since the last call. Cheap once all the memory is there."""
        if self._is_over:
            return
        ready_bytes = self._server.ready_bytes
        if self._server.has_memory and not self._is_ready:
            self._is_ready = True
            self._tell_ready(ready_bytes)
            if sys.stderr.isatty() and ready_bytes < self._memory_bytes:
                self._show_bar()
        if ready_bytes != self._ready_bytes:
            self._ready_bytes, self._moved_s = ready_bytes, self._clock()
            if self._bar is not None:
                self._bar.update(0, completed=ready_bytes)
        if self._is_ready and (ready_bytes >= self._memory_bytes or self._clock() > self._moved_s + STALLED_S):
            self.close()

    def close(self) -> None:
        """Takes the bar away. After it, `look` tells nothing."""
        self._is_over = True
        if self._bar is not None:
            self._bar.stop()

    def _tell_ready(self, ready_bytes: int) -> None:
        so_far = "" if ready_bytes >= self._memory_bytes else f", {describe_size(ready_bytes)} of it so far"
        with contextlib.suppress(BrokenPipeError):
            typer.echo(f"ready: {describe_size(self._memory_bytes)} of memory{so_far}")
        if self._notify:
            notify_ready(self._notify)

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("memory"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task("memory", total=self._memory_bytes)
        self._bar.start()


def notify_ready(address: str) -> None:
    """Reports to systemd (sd_notify) at this address that the server is ready. An address that begins with @ is an
    abstract one. An address where nothing listens is ignored."""
    path = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.setblocking(False)
        end.sendto(b"READY=1", path)
