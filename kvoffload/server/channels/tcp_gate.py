"""Lets a bounded number of TCP connections through to a Unix socket of this process.

ZeroMQ accepts as many connections as there are descriptors, and would leave none for the engines of this machine. So it
only sees the connections that pass here: bytes go both ways unchanged, and when one side closes, the gate closes the
other.

Clients that have shown a key that is listed have places of their own. The others, of whom nothing is known, have other
places, and give way to newcomers: so no number of connections without a key keeps out a client that has one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.packets import accept_open
from kvoffload.server.channels.curve_handshake import CurveHandshake
from kvoffload.server.channels.lifelines import Watcher
from kvoffload.server.channels.open_files import count_processes, is_of_reserve
from kvoffload.tcp_peers import name_peer

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Number of connections that have shown a key. Further ones are closed when they have shown theirs."""
MAX_OF_ONE_HOST = 16
"""Number of them from one machine, so that it cannot keep out all others. Further ones are closed likewise."""
MAX_UNPROVEN = 128
"""Number of connections that have not shown a key yet, where there are descriptors for as many. For one more, the
oldest is closed of the user or address that has most of them."""
READY_AT_ONCE = 64
"""Number of connections' ends that are served in one turn of the loop, however many have sent something or closed."""
ACCEPTS_AT_ONCE = 64
ACCEPT_S = 0.002
"""Seconds after which no more are accepted at once, so that others have their turn."""
CHUNK_BYTES = 64 << 10
"""Bytes read in one direction and not yet written. Until they are written, nothing more is read."""
BACKLOG = 4096
"""Connections that wait to be accepted. Beyond it the kernel drops them, and their clients try again after a second."""


@dataclass(eq=False)
class _Passage:
    """Joins two ends; `pending` has the bytes still to write to each."""

    host: str
    peer: str
    """Name by which it shares the places of those that have not shown a key."""
    outer: socket.socket
    inner: socket.socket
    handshake: CurveHandshake = field(default_factory=CurveHandshake)
    pending: dict[socket.socket, bytes] = field(default_factory=dict)
    is_accepted: bool = False
    """Whether ZeroMQ is known to have accepted the inner connection, which takes one more descriptor."""
    served: int = 0
    """Number of ends that had been served when one of these last was; 0: none has been."""

    def find_other(self, end: socket.socket) -> socket.socket:
        return self.inner if end is self.outer else self.outer


class TcpGate:
    """Belongs to the thread of the event loop, which calls `on_ready` for files that it was asked to watch."""

    def __init__(
        self, address: TcpAddress, inner: Path, watcher: Watcher, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Listens at an address. ConfigError: the address cannot be used."""
        self._inner = inner
        self._watcher = watcher
        self._clock_s = clock_s
        self._by_file: dict[int, tuple[_Passage, socket.socket]] = {}
        self._hosts: Counter[str] = Counter()
        """Connections that have shown a key, by machine."""
        self._unproven: dict[_Passage, None] = {}
        """Those that have not, the oldest first."""
        self._most_unproven = min(MAX_UNPROVEN, max(count_processes() // 4, 1))
        """Each of them takes three descriptors."""
        self._served = 0
        self._listener = _listen(address)
        self.address = TcpAddress(address.host, self._listener.getsockname()[1])
        self._watcher.watch(self._listener.fileno(), writes=False)

    def __len__(self) -> int:
        """Returns how many connections there are."""
        return len(self._by_file) // 2

    @property
    def hosts(self) -> int:
        """Number of machines from which clients have shown a key."""
        return len(self._hosts)

    @property
    def unproven(self) -> int:
        """Number of connections that have not shown a key."""
        return len(self._unproven)

    @property
    def pending_bytes(self) -> int:
        """Bytes read and not yet written, over all connections."""
        return sum(len(passage.pending[end]) for passage, end in self._by_file.values())

    def choose(self, ready: Sequence[int]) -> list[int]:
        """Returns which of these files to serve in this turn of the loop: `READY_AT_ONCE` of the connections' ends,
        first those that were served longest ago, and all others."""
        own = [file for file in ready if file in self._by_file]
        if len(own) <= READY_AT_ONCE:
            return list(ready)
        own.sort(key=lambda file: self._by_file[file][0].served)
        return [*(file for file in ready if file not in self._by_file), *own[:READY_AT_ONCE]]

    def on_ready(self, file: int, *, reads: bool, writes: bool) -> bool:
        """Serves a file that is ready. False: it is none of these."""
        if file == self._listener.fileno():
            end_s = self._clock_s() + ACCEPT_S
            for _ in range(ACCEPTS_AT_ONCE):
                if not self._accept() or self._clock_s() >= end_s:
                    break
            return True
        passage, end = self._by_file.get(file, (None, None))
        if passage is None or end is None:
            return False
        self._served += 1
        passage.served = self._served
        try:
            if writes:
                _flush(passage, end)
            if reads:
                _move(passage, end)
        except OSError:
            self._end(passage)
        else:
            if passage not in self._unproven or not passage.handshake.is_ready or self._prove(passage):
                self._watch(passage)
        return True

    def tick(self) -> None:
        """Accepts connections again after descriptors ran out. The event loop calls it periodically."""
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
            outer = accept_open(self._listener)
        except OSError as fault:
            # The poller would report the waiting client again and again.
            logger.warning("no connection over TCP is accepted for a moment: %s", fault.strerror)
            self._watcher.unwatch(self._listener.fileno())
            return False
        if outer is None:
            return False
        try:
            passage = _Passage(outer.getpeername()[0], name_peer(outer), outer, self._connect())
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            outer.close()
            return True
        awaited = sum(not one.is_accepted for one in self._unproven)
        if is_of_reserve(max(outer.fileno(), passage.inner.fileno()) + awaited + 1):
            # ZeroMQ ends the process if it has no descriptor left for a connection.
            outer.close()
            passage.inner.close()
            return True
        self._unproven[passage] = None
        for end in (passage.outer, passage.inner):
            passage.pending[end] = b""
            self._by_file[end.fileno()] = passage, end
        self._watch(passage)
        if len(self._unproven) > self._most_unproven:
            counts = Counter(one.peer for one in self._unproven)
            most = max(counts.values())
            self._end(next(one for one in self._unproven if counts[one.peer] == most))
        return True

    def _prove(self, passage: _Passage) -> bool:
        """Gives a connection whose client has shown its key a place of those. False: there is none, and it is
        closed."""
        if self._hosts.total() >= MAX_CONNECTIONS or self._hosts[passage.host] >= MAX_OF_ONE_HOST:
            self._end(passage)
            return False
        del self._unproven[passage]
        self._hosts[passage.host] += 1
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
        if passage in self._unproven:
            del self._unproven[passage]
        else:
            self._hosts[passage.host] -= 1
            # A host that is gone costs nothing.
            self._hosts += Counter()


def _move(passage: _Passage, end: socket.socket) -> None:
    """Reads from one end and writes to the other. OSError: one of the two is gone."""
    other = passage.find_other(end)
    if passage.pending[other]:
        # Nothing was awaited from this end, so the event means that it has closed.
        raise ConnectionResetError
    try:
        chunk = end.recv(CHUNK_BYTES)
    except BlockingIOError:
        return
    if not chunk:
        raise ConnectionResetError
    if end is passage.inner:
        passage.is_accepted = True
    if end is passage.inner and not passage.handshake.is_ready:
        passage.handshake.feed(chunk)
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
        f"cannot listen at {address}: {fault.strerror}", remedy="choose another address of this machine, or port"
    )
