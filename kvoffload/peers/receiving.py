"""Receives short messages of a known size, before a link is known to be a peer's."""

from __future__ import annotations

import socket
import time


def receive_exactly(end: socket.socket, size: int, end_s: float) -> bytes:
    """Receives so many bytes, until `end_s` of the monotonic clock. OSError: it has hung up, or takes too long."""
    got = b""
    while len(got) < size:
        end.settimeout(max(end_s - time.monotonic(), 0.001))
        part = end.recv(size - len(got))
        if not part:
            raise ConnectionResetError("it has hung up")
        got += part
    return got
