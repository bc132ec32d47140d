"""Lets a bounded number of TCP connections through to a Unix socket of this process.

ZeroMQ accepts as many connections as there are descriptors, and would leave none for the engines of this machine. So it
never sees more than pass here: bytes go both ways as they are, and whoever is let go at one side is at the other.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.server.channels.lifelines import Watcher

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Beyond it newcomers are let go at once."""
MAX_OF_ONE_HOST = 16
"""Likewise: one machine cannot keep out all others."""
ACCEPTS_AT_ONCE = 8
"""Before others have their turn."""
CHUNK_BYTES = 64 << 10
"""What is read and not yet written of one direction; nothing more is read meanwhile."""
BACKLOG = 64


@dataclass(eq=False)
class _Passage:
    """Joins two ends; `pending` is what is still to be written to each."""

    host: str
    outer: socket.socket
    inner: socket.socket
    pending: dict[socket.socket, bytes] = field(default_factory=dict)

    def find_other(self, end: socket.socket) -> socket.socket:
        return self.inner if end is self.outer else self.outer


class TcpGate:
    """Belongs to the thread of the event loop, which calls `on_ready` for files that it was asked to watch."""

    def __init__(self, address: TcpAddress, inner: Path, watcher: Watcher) -> None:
        """Listens at an address. ConfigError: nobody can listen there."""
        self._inner = inner
        self._watcher = watcher
        self._by_file: dict[int, tuple[_Passage, socket.socket]] = {}
        self._hosts: Counter[str] = Counter()
        self._listener = _listen(address)
        self.address = TcpAddress(address.host, self._listener.getsockname()[1])
        self._watcher.watch(self._listener.fileno(), writes=False)

    def __len__(self) -> int:
        """Returns how many connections there are."""
        return len(self._by_file) // 2

    @property
    def hosts(self) -> int:
        """How many machines the connections come from."""
        return len(self._hosts)

    @property
    def pending_bytes(self) -> int:
        """What was read and not yet written, of all connections."""
        return sum(len(passage.pending[end]) for passage, end in self._by_file.values())

    def on_ready(self, file: int, *, reads: bool, writes: bool) -> bool:
        """Serves a file that is ready. False: it is none of these."""
        if file == self._listener.fileno():
            for _ in range(ACCEPTS_AT_ONCE):
                if not self._accept():
                    break
            return True
        passage, end = self._by_file.get(file, (None, None))
        if passage is None or end is None:
            return False
        try:
            if writes:
                _flush(passage, end)
            if reads:
                _move(passage, end)
        except OSError:
            self._end(passage)
        else:
            self._watch(passage)
        return True

    def tick(self) -> None:
        """Is called now and then: there may be descriptors again."""
        self._watcher.watch(self._listener.fileno(), writes=False)

    def close(self) -> None:
        """Lets all connections go."""
        self._watcher.unwatch(self._listener.fileno())
        self._listener.close()
        while self._by_file:
            passage, _ = next(iter(self._by_file.values()))
            self._end(passage)

    def _accept(self) -> bool:
        try:
            outer, (host, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as fault:
            # Who knocks would be told to us again and again.
            logger.warning("nobody is let in over TCP for a moment: %s", fault.strerror)
            self._watcher.unwatch(self._listener.fileno())
            return False
        if len(self) >= MAX_CONNECTIONS or self._hosts[host] >= MAX_OF_ONE_HOST:
            outer.close()
            return True
        try:
            passage = _Passage(host, outer, self._connect())
            outer.setblocking(False)
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            outer.close()
            return True
        self._hosts[host] += 1
        for end in (passage.outer, passage.inner):
            passage.pending[end] = b""
            self._by_file[end.fileno()] = passage, end
        self._watch(passage)
        return True

    def _connect(self) -> socket.socket:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            inner.connect(str(self._inner))
        except OSError:
            inner.close()
            raise
        return inner

    def _watch(self, passage: _Passage) -> None:
        for end, pending in passage.pending.items():
            is_read = not passage.pending[passage.find_other(end)]
            self._watcher.watch(end.fileno(), reads=is_read, writes=bool(pending))

    def _end(self, passage: _Passage) -> None:
        for end in passage.pending:
            del self._by_file[end.fileno()]
            self._watcher.unwatch(end.fileno())
            end.close()
        self._hosts[passage.host] -= 1
        # A host that is gone costs nothing.
        self._hosts += Counter()


def _move(passage: _Passage, end: socket.socket) -> None:
    """Reads from one end what the other is given. OSError: one of the two is gone."""
    other = passage.find_other(end)
    if passage.pending[other]:
        # It was not waited for, so what was told is its end.
        raise ConnectionResetError
    try:
        chunk = end.recv(CHUNK_BYTES)
    except BlockingIOError:
        return
    if not chunk:
        raise ConnectionResetError
    passage.pending[other] = chunk
    _flush(passage, other)


def _flush(passage: _Passage, end: socket.socket) -> None:
    pending = passage.pending[end]
    if pending:
        with contextlib.suppress(BlockingIOError):
            passage.pending[end] = pending[end.send(pending, socket.MSG_NOSIGNAL) :]


def _listen(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if address.is_version_6 else socket.AF_INET
    try:
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError as fault:
        raise _refuse(address, fault) from fault
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.is_version_6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address.host, address.port))
        made.listen(BACKLOG)
    except OSError as fault:
        made.close()
        raise _refuse(address, fault) from fault
    return made


def _refuse(address: TcpAddress, fault: OSError) -> ConfigError:
    return ConfigError(
        f"nobody can listen at {address}: {fault.strerror}", remedy="choose another address of this machine, or port"
    )
