"""The server's end of the control channel: connections of ZeroMQ's clients, all of whose costs are bounded.

Until its hello is accepted a connection may say little, and not for long. What it is sent and does not read is bounded
in frames and bytes; so is what lies here of all connections of one user, and of all. No reader is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.errors import ConfigError, PacketError
from kvoffload.packets import PacketSocket
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.server.channels.open_files import is_of_reserve
from kvoffload.server.channels.zmtp import GREETING, ZmtpReader, pack_head
from kvoffload.server.shares import has_share
from kvoffload.units import MIB

logger = logging.getLogger(__name__)

QUEUED_FRAMES = 1024
"""That one connection has not read; beyond it is let go."""
FRAMES_AT_ONCE = 64
ACCEPTS_AT_ONCE = 16
BACKLOG = 128
CHUNK_BYTES = 64 << 10

_NOBODY = 2**32 - 1
_READS, _WRITES = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT
_GONE = select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, kw_only=True)
class ControlLimits:
    """Bounds of the control channel. Beyond them connections are let go: of the user who has too much, and of those
    whoever has most."""

    connections: int = 4096
    """Of all users. None gets all of them."""
    unknown: int = 64
    """Of one user, whose hello was not accepted yet. Beyond it the oldest of them goes."""
    hello_s: float = 10.0
    """Until then hello must have been accepted."""
    hello_bytes: int = 16 << 10
    """Of a frame until then."""
    connection_bytes: int = 4 * FRAME_BYTES
    """That a connection has not read."""
    user_bytes: int = 256 * MIB
    """Of all connections of one user: what they have not read, and frames that are not whole."""
    all_bytes: int = 1024 * MIB


@dataclass(eq=False)
class _Connection:
    key: bytes
    end: socket.socket
    uid: int
    reader: ZmtpReader
    until_s: float
    """When it is let go unless its hello was accepted; 0: it was."""
    queue: deque[memoryview] = field(default_factory=deque)
    """What it has not taken of frames that were sent."""
    queued_bytes: int = 0
    counted_bytes: int = 0
    """As its user was charged the last time."""
    is_ready: bool = False
    """It is in the line of those that may have said something."""
    has_ended: bool = False
    """It says nothing more; what it said is served still."""


class ControlSocket:
    """Belongs to the thread of the event loop, which receives when `fileno` is readable."""

    def __init__(
        self,
        path: Path,
        *,
        mode: int = 0o600,
        group: int | None = None,
        limits: ControlLimits | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at a path. ConfigError: it cannot be used."""
        self._path = path
        self._limits = limits or ControlLimits()
        self._clock_s = clock_s
        self.endpoint = f"ipc://{path}"
        self._listener = _listen(path, mode, group)
        self._is_listening = False
        self._poll = select.epoll()
        self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._more, _READS)
        self._listen_again()
        self._last = 0
        self._by_key: dict[bytes, _Connection] = {}
        self._by_file: dict[int, _Connection] = {}
        self._unknown: dict[bytes, _Connection] = {}
        """The oldest first."""
        self._ready: deque[_Connection] = deque()
        self._ended: list[bytes] = []
        self._users: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._chunk = memoryview(bytearray(CHUNK_BYTES))

    def __len__(self) -> int:
        """Returns how many connections there are."""
        return len(self._by_key)

    def fileno(self) -> int:
        """Returns the descriptor for a poller."""
        return self._poll.fileno()

    @property
    def held_bytes(self) -> int:
        """Of frames that are not whole, or not read by who was sent them."""
        return self._bytes.total()

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next connection and frame; None: there is none. A message of several parts is one without bytes."""
        if not self._ready:
            self._look()
        while self._ready:
            one = self._ready.popleft()
            one.is_ready = False
            frame = self._take(one)
            if frame is not None:
                return one.key, frame
        return None

    def leave(self) -> None:
        """Others have their turn: `fileno` is readable if something was received that nobody has taken."""
        if self._ready:
            os.eventfd_write(self._more, 1)

    def take_ended(self) -> list[bytes]:
        """Connections that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def find_user(self, connection: bytes) -> int:
        """Returns a connection's user, by the kernel's word; nobody, if it has ended."""
        one = self._by_key.get(connection)
        return _NOBODY if one is None else one.uid

    def is_unknown(self, connection: bytes) -> bool:
        """Says whether a connection was not trusted yet."""
        return connection in self._unknown

    def trust(self, connection: bytes) -> None:
        """Its hello was accepted."""
        one = self._unknown.pop(connection, None)
        if one is not None:
            one.until_s = 0
            one.reader.frame_bytes = FRAME_BYTES

    def send(self, connection: bytes, frame: bytes) -> bool:
        """Sends a frame. False: the connection is gone, or has not read what it was sent before."""
        one = self._by_key.get(connection)
        if one is None:
            return False
        if len(one.queue) >= QUEUED_FRAMES or one.queued_bytes + len(frame) > self._limits.connection_bytes:
            self._end(one)
            return False
        self._write(one, pack_head(len(frame)) + frame)
        return connection in self._by_key

    def tick(self) -> None:
        """Is called now and then: lets go of who did not say hello in time, and lets others in again."""
        now_s = self._clock_s()
        while self._unknown:
            one = next(iter(self._unknown.values()))
            if one.until_s > now_s:
                break
            self._end(one)
        self._listen_again()

    def close(self) -> None:
        """Once more does nothing: by then the path may be a successor's."""
        if self._poll.closed:
            return
        for one in list(self._by_key.values()):
            self._end(one)
        self._listener.close()
        self._poll.close()
        os.close(self._more)
        with contextlib.suppress(OSError):
            self._path.unlink()

    # ---- what comes ----

    def _look(self) -> None:
        for file, flags in self._poll.poll(0, FRAMES_AT_ONCE):
            one = self._by_file.get(file)
            if one is not None:
                if flags & select.EPOLLOUT:
                    self._flush(one)
                if flags & (_READS | _GONE) and one.key in self._by_key:
                    self._read(one)
            elif file == self._more:
                os.eventfd_read(self._more)
            elif file == self._listener.fileno():
                for _ in range(ACCEPTS_AT_ONCE):
                    if not self._accept():
                        break

    def _read(self, one: _Connection) -> None:
        try:
            count = one.end.recv_into(self._chunk)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            one.reader.feed(self._chunk[:count])
        else:
            one.has_ended = True
            self._poll.unregister(one.end)
        self._line_up(one)

    def _line_up(self, one: _Connection) -> None:
        if not one.is_ready:
            one.is_ready = True
            self._ready.append(one)

    def _take(self, one: _Connection) -> bytes | None:
        if one.key not in self._by_key:
            return None
        try:
            frame = one.reader.take()
        except PacketError as fault:
            logger.debug("a control connection of user %d is let go: %s", one.uid, fault)
            self._end(one)
            return None
        reply = one.reader.take_reply()
        if reply:
            self._write(one, reply)
        if frame is not None and (len(one.reader) or one.has_ended):
            self._line_up(one)
        elif frame is None and one.has_ended:
            self._end(one)
        else:
            self._charge(one)
        return frame

    # ---- what goes ----

    def _write(self, one: _Connection, data: bytes) -> None:
        sent = 0
        if not one.queue:
            try:
                sent = one.end.send(data)
            except BlockingIOError:
                pass
            except OSError:
                # What it said before it went is served still; that is seen when it is read.
                return
            if sent == len(data):
                return
            self._watch(one, _WRITES)
        one.queue.append(memoryview(data)[sent:])
        one.queued_bytes += len(data) - sent
        self._charge(one)

    def _flush(self, one: _Connection) -> None:
        try:
            while one.queue:
                sent = one.end.send(one.queue[0])
                one.queued_bytes -= sent
                if sent < len(one.queue[0]):
                    one.queue[0] = one.queue[0][sent:]
                    break
                one.queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            one.queue.clear()
            one.queued_bytes = 0
        if not one.queue:
            self._watch(one, _READS)
        self._charge(one)

    def _watch(self, one: _Connection, flags: int) -> None:
        if not one.has_ended:
            self._poll.modify(one.end, flags)

    # ---- who comes, and goes ----

    def _accept(self) -> bool:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as fault:
            # Who knocks would be told to us again and again.
            logger.warning("no control connection is let in for a moment: %s", fault.strerror)
            self._poll.unregister(self._listener)
            self._is_listening = False
            return False
        try:
            uid = PacketSocket(end).credentials().uid
        except PacketError:
            end.close()
            return True
        has_room = has_share(self._users[uid], total=len(self), limit=self._limits.connections)
        if is_of_reserve(end.fileno()) or not has_room:
            end.close()
            return True
        self._admit(end, uid)
        return True

    def _admit(self, end: socket.socket, uid: int) -> None:
        unknown = [one for one in self._unknown.values() if one.uid == uid]
        if len(unknown) >= self._limits.unknown:
            self._end(unknown[0])
        end.setblocking(False)
        self._last += 1
        until_s = self._clock_s() + self._limits.hello_s
        reader = ZmtpReader(frame_bytes=self._limits.hello_bytes)
        one = _Connection(self._last.to_bytes(8, "little"), end, uid, reader, until_s)
        self._by_key[one.key] = self._by_file[end.fileno()] = self._unknown[one.key] = one
        self._users[uid] += 1
        self._poll.register(end, _READS)
        self._write(one, GREETING)

    def _end(self, one: _Connection) -> None:
        if self._by_key.pop(one.key, None) is None:
            return
        self._unknown.pop(one.key, None)
        del self._by_file[one.end.fileno()]
        if not one.has_ended:
            self._poll.unregister(one.end)
        one.end.close()
        self._users[one.uid] -= 1
        self._bytes[one.uid] -= one.counted_bytes
        if not self._users[one.uid]:
            # A user who is gone costs nothing.
            del self._users[one.uid], self._bytes[one.uid]
        self._ended.append(one.key)

    def _listen_again(self) -> None:
        if not self._is_listening:
            self._poll.register(self._listener, _READS)
            self._is_listening = True

    # ---- memory ----

    def _charge(self, one: _Connection) -> None:
        """What lies here for a connection, to its user; and who has most goes, if that is too much."""
        held = one.queued_bytes + len(one.reader)
        if held == one.counted_bytes:
            return
        self._bytes[one.uid] += held - one.counted_bytes
        one.counted_bytes = held
        while self._bytes[one.uid] > self._limits.user_bytes:
            self._end_largest(one.uid)
        while self._bytes.total() > self._limits.all_bytes:
            self._end_largest(max(self._bytes, key=self._bytes.__getitem__))

    def _end_largest(self, uid: int) -> None:
        largest = max(
            (one for one in self._by_key.values() if one.uid == uid), key=lambda one: one.counted_bytes, default=None
        )
        if largest is None:
            return
        logger.warning("user %d has not read or not finished %d bytes: a connection is let go", uid, self._bytes[uid])
        self._end(largest)


def _listen(path: Path, mode: int, group: int | None) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    former = os.umask(0o777 & ~mode)
    try:
        if path.is_socket():
            # The lifelines' lock is ours: it is a dead server's.
            path.unlink()
        made.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        made.listen(BACKLOG)
    except OSError as fault:
        made.close()
        raise ConfigError(
            f"socket {path} cannot be used: {fault.strerror or fault}",
            remedy="choose another path of at most 107 bytes",
        ) from fault
    finally:
        os.umask(former)
    return made
