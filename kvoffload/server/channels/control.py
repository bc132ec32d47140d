"""The server's end of the control channel: connections of ZeroMQ clients, each with bounded cost.

Until its hello is accepted, a connection may send only small frames, and has a deadline. The frames that a client has
not read are bounded in number and bytes, and so are the bytes held for all connections of one user, and for all users.
The server never waits for a client to read.
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
from kvoffload.packets import PacketSocket, accept_open, is_empty, refuse_descriptors, shut
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.server.channels.foreign_files import NOBODY, REFUSED, ForeignFiles
from kvoffload.server.channels.open_files import count_processes, is_of_reserve
from kvoffload.server.common.shares import has_share
from kvoffload.server.common.turns import Turns
from kvoffload.units import MIB
from kvoffload.zmtp import GREETING, ZmtpReader, pack_head

logger = logging.getLogger(__name__)

QUEUED_FRAMES = 1024
"""Number of frames that one connection may leave unread. A connection with more is closed."""
FRAMES_AT_ONCE = 64
READS_AT_ONCE = 16
"""Number of connections of one user that are read at once, each at most CHUNK_BYTES."""
ACCEPTS_AT_ONCE = 256
"""Number of connections that are accepted at once, so that those of one user leave room for others in the backlog."""
ACCEPT_S = 0.002
"""Seconds after which no more are accepted at once, so that processes that have joined do not wait for newcomers."""
BACKLOG = 4096
"""Connections that wait to be accepted. Beyond it the kernel refuses them, and their clients try again later."""
CHUNK_BYTES = 64 << 10

_KIND = "control"
"""The kind under which connections that a thread still has to close count."""
_READS, _WRITES = select.EPOLLIN, select.EPOLLOUT
_GONE = select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, kw_only=True)
class ControlLimits:
    """Bounds of the control channel. New connections beyond `connections` are refused. Beyond `user_bytes` the user's
    largest connection is closed, beyond `all_bytes` the largest one of the user who has the most."""

    connections: int = 4096
    """Number of connections of all users together, where there are descriptors for as many. No user can take all of
    them."""
    unknown: int = 64
    """Number of connections of one user whose hello has not been accepted yet. Beyond it the oldest of them is
    closed."""
    hello_s: float = 10.0
    """Seconds within which a new connection must have its hello accepted."""
    hello_bytes: int = 16 << 10
    """Size limit of a frame before the hello is accepted, in bytes."""
    connection_bytes: int = 4 * FRAME_BYTES
    """Number of bytes that one connection may leave unread."""
    user_bytes: int = 256 * MIB
    """Bytes held for all connections of one user: what they have not read, and frames that are not complete."""
    all_bytes: int = 1024 * MIB


@dataclass(eq=False)
class _Connection:
    key: bytes
    end: socket.socket
    uid: int
    reader: ZmtpReader
    until_s: float
    """Time at which it is closed unless its hello has been accepted by then; 0 once it has."""
    queue: deque[memoryview] = field(default_factory=deque)
    """The parts of sent frames that the client has not read yet."""
    queued_bytes: int = 0
    counted_bytes: int = 0
    """Bytes that are charged to its user for this connection."""
    is_ready: bool = False
    """Whether it waits in the line of connections that may have sent something."""
    is_held: bool = False
    """Whether nothing that it sends is taken for now."""
    has_ended: bool = False
    """Whether the client has closed its end. Frames that it sent before are still served."""


class ControlSocket:
    """Belongs to the thread of the event loop, which receives when `fileno` is readable."""

    def __init__(
        self,
        path: Path,
        *,
        files: ForeignFiles,
        mode: int = 0o600,
        group: int | None = None,
        limits: ControlLimits | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at a path. ConfigError: it cannot be used."""
        self._path = path
        self._files = files
        self._limits = limits or ControlLimits()
        self._limit = min(self._limits.connections, count_processes())
        self._clock_s = clock_s
        self.endpoint = f"ipc://{path}"
        self._listener = _listen(path, mode, group)
        self._may_come_with_files = not refuse_descriptors(self._listener)
        """Whether the kernel lets clients send descriptors here, to let go of which may take long."""
        self._is_listening = False
        self._has_warned = False
        """Whether the log says that no connection can be let in. One that is let in resets this."""
        self._poll = select.epoll()
        self._first = 0
        """The place, among the connections that are ready, at which the next look begins."""
        self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._more, _READS)
        self._listen_again()
        self._last = 0
        self._by_key: dict[bytes, _Connection] = {}
        self._by_file: dict[int, _Connection] = {}
        self._unknown: dict[bytes, _Connection] = {}
        """Connections whose hello has not been accepted yet, the oldest first."""
        self._ready = Turns[_Connection]()
        """Connections that may have sent something."""
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
        """Bytes held of frames that have not arrived completely, or that their receiver has not read."""
        return self._bytes.total()

    def receive(self) -> tuple[bytes, bytes] | None:
        """Returns the next connection and its frame; None: there is none. Users take turns, however many connections
        one has. A message of several parts is returned as an empty frame."""
        if not self._ready:
            self.look()
        while self._ready:
            _, one = self._ready.take()
            one.is_ready = False
            frame = None if one.is_held else self._take(one)
            if frame is not None:
                return one.key, frame
        return None

    def hold(self, connection: bytes) -> None:
        """Takes nothing more from a connection until `resume`. What it sends meanwhile stays in its socket."""
        one = self._by_key.get(connection)
        if one is not None:
            one.is_held = True
            self._watch(one)

    def resume(self, connection: bytes) -> None:
        """Takes frames from a connection again."""
        one = self._by_key.get(connection)
        if one is not None:
            one.is_held = False
            self._watch(one)
            self._line_up(one)

    def leave(self) -> None:
        """Ends a turn of receiving: `fileno` stays readable if frames are left that `receive` has not returned."""
        if self._ready:
            os.eventfd_write(self._more, 1)

    def take_ended(self) -> list[bytes]:
        """Returns the connections that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def find_user(self, connection: bytes) -> int:
        """Returns a connection's user as the kernel names it, or `NOBODY` if the connection has ended."""
        one = self._by_key.get(connection)
        return NOBODY if one is None else one.uid

    def is_unknown(self, connection: bytes) -> bool:
        """Whether a connection's hello has not been accepted yet."""
        return connection in self._unknown

    def trust(self, connection: bytes) -> None:
        """Notes that its hello was accepted: it has no deadline any more, and may send large frames."""
        one = self._unknown.pop(connection, None)
        if one is not None:
            one.until_s = 0
            one.reader.frame_bytes = FRAME_BYTES

    def send(self, connection: bytes, frame: bytes) -> bool:
        """Sends a frame. False: the connection is gone, or is closed because it has too many unread frames."""
        one = self._by_key.get(connection)
        if one is None:
            return False
        if len(one.queue) >= QUEUED_FRAMES or one.queued_bytes + len(frame) > self._limits.connection_bytes:
            self._end(one)
            return False
        self._write(one, pack_head(len(frame)) + frame)
        return connection in self._by_key

    def tick(self) -> None:
        """Closes connections that did not say hello in time, and listens again. The event loop calls it
        periodically."""
        now_s = self._clock_s()
        while self._unknown:
            one = next(iter(self._unknown.values()))
            if one.until_s > now_s:
                break
            self._end(one)
        self._listen_again()

    def close(self) -> None:
        """Closes all connections and removes the socket. Calling it again has no effect: by then the path may belong to
        a successor."""
        if self._poll.closed:
            return
        for one in list(self._by_key.values()):
            self._end(one)
        self._close_end(NOBODY, self._listener)
        self._poll.close()
        os.close(self._more)
        with contextlib.suppress(OSError):
            self._path.unlink()

    # ---- what comes ----

    def look(self) -> None:
        """Reads what some connections have sent. To be called once in each turn of the loop, so that connections that
        have sent more than can be served hide no others. The connections of one user hide none of another."""
        looked: Counter[int] = Counter()
        found = self._poll.poll(0, len(self._by_file) + 2)
        # The kernel lists those first that were ready first, however often they were looked at since.
        self._first = (self._first + READS_AT_ONCE) % max(len(found), 1)
        for file, flags in found[self._first :] + found[: self._first]:
            one = self._by_file.get(file)
            if one is not None:
                looked[one.uid] += 1
                if looked[one.uid] > READS_AT_ONCE:
                    continue
                if flags & select.EPOLLOUT:
                    self._flush(one)
                if flags & (_READS | _GONE) and one.key in self._by_key:
                    self._read(one)
            elif file == self._more:
                os.eventfd_read(self._more)
            elif file == self._listener.fileno():
                end_s = self._clock_s() + ACCEPT_S
                for _ in range(ACCEPTS_AT_ONCE):
                    if not self._accept() or self._clock_s() >= end_s:
                        break

    def _read(self, one: _Connection) -> None:
        try:
            count = self._receive(one)
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

    def _receive(self, one: _Connection) -> int:
        """Receives bytes. OSError: there are none, or the next ones come with descriptors, which clients may not
        send here."""
        if not self._may_come_with_files:
            return one.end.recv_into(self._chunk)
        count, _, flags, _ = one.end.recvmsg_into([self._chunk], 0, socket.MSG_PEEK)
        if flags & socket.MSG_CTRUNC:
            raise PermissionError("descriptors came over a control connection")
        # Later bytes may have descriptors, and stay in the socket.
        return one.end.recv_into(self._chunk[:count]) if count else 0

    def _line_up(self, one: _Connection) -> None:
        if not one.is_ready:
            one.is_ready = True
            self._ready.add(one.uid, one)

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
                # Frames that it sent before it closed are still served; reading finds out that it has closed.
                return
            if sent == len(data):
                return
        one.queue.append(memoryview(data)[sent:])
        one.queued_bytes += len(data) - sent
        if len(one.queue) == 1:
            self._watch(one)
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
            self._watch(one)
        self._charge(one)

    def _watch(self, one: _Connection) -> None:
        if not one.has_ended:
            self._poll.modify(one.end, (0 if one.is_held else _READS) | (_WRITES if one.queue else 0))

    # ---- who comes, and goes ----

    def _accept(self) -> bool:
        try:
            end = accept_open(self._listener)
        except OSError as fault:
            # The poller would report the waiting client again and again.
            self._warn(fault)
            self._poll.unregister(self._listener)
            self._is_listening = False
            return False
        if end is None:
            return False
        try:
            uid = PacketSocket(end).credentials().uid
        except PacketError:
            self._close_end(NOBODY, end)
            return True
        of_user, total = self._users[uid] + self._files.count(uid, _KIND), len(self) + self._files.total(_KIND)
        if is_of_reserve(end.fileno()) or not has_share(of_user, total=total, limit=self._limit):
            self._close_end(uid, end, kind=REFUSED)
            return True
        self._admit(end, uid)
        return True

    def _admit(self, end: socket.socket, uid: int) -> None:
        unknown = [one for one in self._unknown.values() if one.uid == uid]
        if len(unknown) >= self._limits.unknown:
            self._end(unknown[0])
        try:
            self._poll.register(end, _READS)
        except OSError as fault:
            self._warn(fault)
            self._close_end(uid, end)
            return
        self._has_warned = False
        self._last += 1
        until_s = self._clock_s() + self._limits.hello_s
        reader = ZmtpReader(frame_bytes=self._limits.hello_bytes)
        one = _Connection(self._last.to_bytes(8, "little"), end, uid, reader, until_s)
        self._by_key[one.key] = self._by_file[end.fileno()] = self._unknown[one.key] = one
        self._users[uid] += 1
        self._write(one, GREETING)

    def _end(self, one: _Connection) -> None:
        if self._by_key.pop(one.key, None) is None:
            return
        self._unknown.pop(one.key, None)
        del self._by_file[one.end.fileno()]
        if not one.has_ended:
            self._poll.unregister(one.end)
        self._close_end(one.uid, one.end)
        self._users[one.uid] -= 1
        self._bytes[one.uid] -= one.counted_bytes
        if not self._users[one.uid]:
            # A user who is gone costs nothing.
            del self._users[one.uid], self._bytes[one.uid]
        self._ended.append(one.key)

    def _close_end(self, uid: int, end: socket.socket, *, kind: str = _KIND) -> None:
        """Closes a connection, or the listener with those that wait: at once unless descriptors may lie there."""
        shut(end)
        if self._may_come_with_files and not is_empty(end):
            self._files.close_end(uid, kind, end.close)
        else:
            end.close()

    def _listen_again(self) -> None:
        if not self._is_listening:
            with contextlib.suppress(OSError):
                self._poll.register(self._listener, _READS)
                self._is_listening = True

    def _warn(self, fault: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("no control connection can be let in for now: %s", fault.strerror)

    # ---- memory ----

    def _charge(self, one: _Connection) -> None:
        """Charges the bytes held for a connection to its user, and closes the largest connections of a user, or of the
        user with the most, when a bound is exceeded."""
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
            # This server holds the lock of the lifelines' socket, so the control socket was left by a dead server.
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
