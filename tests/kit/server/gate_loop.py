"""A loop for a gate of TCP connections."""

from __future__ import annotations

import select

from kvoffload.server.channels.tcp_gate import TcpGate


class Loop:
    """Watches as the server does."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.watched: dict[int, int] = {}

    def watch(self, file: int, *, writes: bool, reads: bool = True) -> None:
        flags = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        self.watched[file] = flags
        self.poll.register(file, flags)

    def unwatch(self, file: int) -> None:
        if self.watched.pop(file, None) is not None:
            self.poll.unregister(file)

    def turn(self, gate: TcpGate) -> int:
        """Turns once, and returns how many files were ready."""
        ready = self.poll.poll(1)
        for file, flags in ready:
            gate.on_ready(file, reads=bool(flags & ~select.POLLOUT), writes=bool(flags & select.POLLOUT))
        return len(ready)
