"""The server's end of all lifelines: a packet connection for each process, and the packets still to send to each.

This module knows packets and messages; the core decides what they say. Nothing blocks and everything is bounded: a
connection that does not greet makes room for others, and a process that does not read is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvoffload.errors import PacketError
from kvoffload.packets import MAX_DESCRIPTORS, Credentials, Packet, PacketSocket, close_all
from kvoffload.protocol import (
    CODEC,
    Call,
    Channel,
    Error,
    ErrorCode,
    Farewell,
    Greeting,
    Holding,
    Offer,
    ProtocolFault,
    ServerMessage,
    answer_fault,
)
from kvoffload.server.channels.foreign_files import NOBODY, REFUSED, ForeignFiles
from kvoffload.server.channels.open_files import count_processes, is_of_reserve
from kvoffload.server.channels.unix_listener import UnixListener
from kvoffload.server.channels.unread_descriptors import UnreadDescriptors
from kvoffload.server.common.shares import has_share
from kvoffload.server.common.turns import Turns
from kvoffload.units import MIB

logger = logging.getLogger(__name__)

MAX_LIFELINES = 8192
"""Number of lifelines of all users together, where there are descriptors for as many. No user can take all of them."""
MAX_UNGREETED = 64
"""Number of connections that have not greeted. A newer one replaces the oldest of the user who has the most of them."""
UNGREETED_OF_USER = 48
"""Number of those that one user may have. A newer one of this user replaces the oldest."""
REPLACED_AT_ONCE = 4
"""Number of connections that the user who has the most replaces in one turn of the loop. Further ones are refused,
which takes a part of the time: other newcomers would wait for a user who opens connections as fast as he can."""
MAX_QUEUED = 512
"""Packets that a process may leave unread: enough for the memory of 100,000 segments."""
QUEUED_BYTES = 2 * MIB
"""Bytes of packets that a process may leave unread."""
ALL_QUEUED_BYTES = 64 * MIB
"""Bytes of unread packets of all processes. The processes of one user cannot take all of it."""
READ_S = 10.0
"""Seconds without reading after which a process is disconnected, if others wait for descriptors."""
ACCEPTS_AT_ONCE = 64
ACCEPT_S = 0.004
"""Seconds after which no more are accepted at once, so that processes that have joined do not wait for newcomers."""
PACKETS_AT_ONCE = 4
"""Packets read from one process before the others have their turn."""
LINES_AT_ONCE = 8
"""Number of lifelines that are served in one turn of the loop, however many have sent something."""
_KIND = "lifeline"
"""The kind under which lifelines that a thread still has to close count."""


class Watcher(Protocol):
    """The event loop, as far as others ask it to wait for their files."""

    def watch(self, file: int, *, writes: bool, reads: bool = True) -> None:
        """Waits until the file is readable, and with `writes` also until it is writable. A later call for the same file
        replaces these conditions."""
        ...

    def unwatch(self, file: int) -> None:
        """Stops waiting for a file, if it did."""
        ...


class LifelineHandler(Protocol):
    """Handles what arrives over lifelines. While it is called, it may send to this and other lifelines, and close
    them."""

    def on_greeting(self, lifeline: int, call: Call, credentials: Credentials, pidfd: int | None) -> None:
        """Handles a greeting. Takes the pidfd."""
        ...

    def wants_offer(self, lifeline: int, offer: Offer) -> bool:
        """Returns whether an offer is wanted. If not, its descriptors are not received."""
        ...

    def on_offer(self, lifeline: int, offer: Offer, descriptors: list[int]) -> None:
        """Handles an offer that is wanted, and takes its descriptors."""
        ...

    def on_holding(self, lifeline: int, holding: Holding) -> None: ...

    def on_farewell(self, lifeline: int, farewell: Farewell) -> None: ...

    def on_end(self, lifeline: int) -> None:
        """Handles the end of a lifeline that has greeted: its process is gone, or was disconnected."""
        ...


@dataclass(eq=False)
class _Line:
    number: int
    end: PacketSocket
    credentials: Credentials
    has_greeted: bool = False
    is_receiving: bool = False
    """Whether another thread receives a packet of this line. Until it has come, no other is read or sent."""
    events: int = 0
    served: int = 0
    """Number of lifelines that had been served when this one last was; 0: it has not been."""
    queue: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)
    queued_bytes: int = 0
    owned: set[int] = field(default_factory=set)
    """Descriptors that are closed once they are sent, or the line ends."""

    @property
    def uid(self) -> int:
        return self.credentials.uid

    def close_owned(self, sent: Sequence[int]) -> None:
        done = self.owned.intersection(sent)
        self.owned -= done
        close_all(list(done))


class Lifelines:
    """Belongs to the thread of the event loop, which calls `on_ready` for files that it was asked to watch."""

    def __init__(
        self,
        listener: UnixListener,
        watcher: Watcher,
        handler: LifelineHandler,
        *,
        boot_id: int,
        files: ForeignFiles,
        clock_s: Callable[[], float],
    ) -> None:
        self._clock_s = clock_s
        self._listener = listener
        self._files = files
        self._watcher = watcher
        self._handler = handler
        self._boot_id = boot_id
        self._processes = count_processes()
        self._last = 0
        self._served = 0
        """Number of lifelines that `choose` has chosen so far."""
        self._queued: Counter[int] = Counter()
        """Bytes that processes have not read, by user."""
        self._lines: dict[int, _Line] = {}
        self._by_file: dict[int, _Line] = {}
        self._ungreeted: dict[int, dict[int, _Line]] = {}
        """Lifelines that have not greeted, by user, the oldest first."""
        self._replaced: Counter[int] = Counter()
        """Number of these that were replaced in this turn, by user."""
        self._users: Counter[int] = Counter()
        self._unread = UnreadDescriptors()
        self._waiting: dict[int, _Line] = {}
        """Lifelines whose next packet has descriptors that cannot be sent for now."""
        self._is_full = False
        """Whether the listener is not watched, because no connection could be accepted. The next tick watches it."""
        self._has_warned = False
        """Whether the log says so already. A connection that is accepted resets this."""
        watcher.watch(listener.fileno(), writes=False)
        watcher.watch(files.fileno(), writes=False)

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def is_receiving(self) -> bool:
        """Whether a packet has come that is not served yet, because another thread receives it."""
        return any(line.is_receiving for line in self._lines.values())

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that wait for processes to read them, all together."""
        return self._queued.total()

    def choose(self, ready: Iterable[int]) -> list[int]:
        """Returns which of these files to serve in this turn of the loop: LINES_AT_ONCE of the lifelines, and all
        others. Users take turns, and of each user that lifeline comes first that was served longest ago."""
        files = list(ready)
        chosen = [file for file in files if file not in self._by_file]
        lines = sorted((self._by_file[file] for file in files if file in self._by_file), key=lambda line: line.served)
        turns = Turns[_Line]()
        for line in lines:
            turns.add(line.uid, line)
        for _ in range(min(LINES_AT_ONCE, len(lines))):
            _, line = turns.take()
            self._served += 1
            line.served = self._served
            chosen.append(line.end.fileno())
        return chosen

    def on_ready(self, file: int, *, reads: bool, writes: bool) -> bool:
        """Serves a file that is ready. False: it is none of these."""
        if file == self._listener.fileno():
            end_s = self._clock_s() + ACCEPT_S
            self._replaced.clear()
            for _ in range(ACCEPTS_AT_ONCE):
                if not self._accept() or self._clock_s() >= end_s:
                    break
            return True
        if file == self._files.fileno():
            self._files.finish()
            return True
        line = self._by_file.get(file)
        if line is None:
            return False
        if writes:
            self._flush(line)
        if reads:
            self._read(line)
        return True

    def send_reply(self, lifeline: int, message: ServerMessage, number: int, descriptors: Sequence[int] = ()) -> None:
        """Sends a reply, unless the lifeline has ended. The descriptors stay the caller's, and open until they are
        sent."""
        line = self._lines.get(lifeline)
        if line is not None:
            self._send(line, message, number, descriptors)

    def send_event(
        self, lifeline: int, message: ServerMessage, descriptors: Sequence[int] = (), *, taken: Sequence[int] = ()
    ) -> bool:
        """Sends an event. False: the lifeline has ended. Those of the descriptors that are `taken` are closed once they
        are sent."""
        line = self._lines.get(lifeline)
        if line is None:
            close_all(taken)
            return False
        line.owned.update(taken)
        line.events += 1
        self._send(line, message, line.events, descriptors)
        return True

    def end(self, lifeline: int) -> None:
        """Closes a process's lifeline."""
        line = self._lines.get(lifeline)
        if line is not None:
            self._end(line)

    def tick(self, now_s: float) -> None:
        """Tries again to send what could not be sent, and disconnects a process that has not read its descriptors for
        READ_S. Lets in processes again, if none could be let in. The event loop calls it periodically."""
        self._listen_again()
        self._files.start_threads()
        if not self._waiting:
            return
        for line in list(self._waiting.values()):
            self._flush(line)
        silent = self._unread.find_silent(now_s, silence_s=READ_S) if self._waiting else None
        if silent is not None:
            logger.warning("a process of user %d has not read its descriptors: it is let go", self._lines[silent].uid)
            self.end(silent)

    def stop_listening(self) -> None:
        """Accepts no more lifelines; those that are open stay open. The owner of the listener closes its path."""
        if self._listener.fileno() != -1:
            if not self._is_full:
                self._watcher.unwatch(self._listener.fileno())
            self._listener.stop(lambda file: self._files.close_files(NOBODY, [file]))

    def close(self) -> None:
        """Closes all lifelines. The handler is told of each that has greeted."""
        self.stop_listening()
        for line in list(self._lines.values()):
            self._end(line)

    def _accept(self) -> bool:
        try:
            connected = self._listener.accept()
        except OSError as fault:
            # The poller would report the waiting process again and again.
            if not self._has_warned:
                self._has_warned = True
                logger.warning("no process can be let in for now: %s", fault.strerror)
            self._watcher.unwatch(self._listener.fileno())
            self._is_full = True
            return False
        if connected is None:
            return False
        self._has_warned = False
        end = PacketSocket(connected)
        try:
            credentials = end.credentials()
        except PacketError:
            self._close_end(NOBODY, end)
            return True
        self._last += 1
        line = _Line(self._last, end, credentials)
        limit = min(MAX_LIFELINES, self._processes)
        of_user = self._users[credentials.uid] + self._files.count(credentials.uid, _KIND)
        has_room = has_share(of_user, total=len(self._lines) + self._files.total(_KIND), limit=limit)
        if not has_room or is_of_reserve(end.fileno()):
            full = Error(code=ErrorCode.BUSY, message=f"greeting: there are {len(self._lines)} lifelines")
            with contextlib.suppress(PacketError):
                end.send(self._encode(full, 0))
            self._close_end(credentials.uid, end, kind=REFUSED)
            return True
        if not self._make_place(credentials.uid):
            self._close_end(credentials.uid, end, kind=REFUSED)
            return True
        self._users[line.uid] += 1
        self._lines[line.number] = self._by_file[end.fileno()] = line
        self._ungreeted.setdefault(line.uid, {})[line.number] = line
        self._watcher.watch(end.fileno(), writes=False)
        return True

    def _make_place(self, uid: int) -> bool:
        """Makes a place for one more lifeline of a user that has not greeted. False: it is refused."""
        own = self._ungreeted.get(uid, {})
        if len(own) < UNGREETED_OF_USER and sum(map(len, self._ungreeted.values())) < MAX_UNGREETED:
            return True
        most = max(self._ungreeted.values(), key=len)
        if len(own) == len(most) and self._replaced[uid] >= REPLACED_AT_ONCE:
            return False
        self._replaced[uid] += 1
        self._end(next(iter(most.values())))
        return True

    def _read(self, line: _Line) -> None:
        for _ in range(PACKETS_AT_ONCE):
            if line.number not in self._lines or line.is_receiving:
                return
            seen = line.end.peek()
            if seen is None:
                return
            call = CODEC.decode_call(seen.data, channel=Channel.LIFELINE)
            pidfd = self._open_pidfd(line, call)
            receive = partial(_receive, line.end, self._count_wanted(line, call, pidfd))
            if seen.has_descriptors:
                # To let go of those that are not wanted may take as long as their sender likes.
                line.is_receiving = True
                self._watcher.unwatch(line.end.fileno())
                self._files.do(line.uid, receive, then=partial(self._take, line, call, pidfd))
                return
            self._take(line, call, pidfd, receive())

    def _take(self, line: _Line, call: Call | ProtocolFault, pidfd: int | None, packet: Packet | None) -> None:
        """Serves a packet that was received; None: it could not be."""
        if packet is None or line.number not in self._lines:
            close_all([] if pidfd is None else [pidfd])
            self._files.close_files(line.uid, [] if packet is None else packet.take())
            self._end(line)
            return
        if line.is_receiving:
            line.is_receiving = False
            self._flush(line)
        if line.number in self._lines:
            self._serve(line, call, packet, pidfd)

    def _open_pidfd(self, line: _Line, call: Call | ProtocolFault) -> int | None:
        """Returns the pidfd of a process that greets, or None if the kernel cannot tell which process it is."""
        if isinstance(call, ProtocolFault) or not isinstance(call.message, Greeting):
            return None
        return line.end.open_pidfd() or _open_pidfd(line.credentials.pid)

    def _count_wanted(self, line: _Line, call: Call | ProtocolFault, pidfd: int | None) -> int:
        """Returns how many descriptors of its packet are received. Unwanted ones never are."""
        if isinstance(call, ProtocolFault):
            return 0
        if isinstance(call.message, Greeting):
            return int(pidfd is None)
        if not line.has_greeted or not isinstance(call.message, Offer):
            return 0
        return MAX_DESCRIPTORS if self._handler.wants_offer(line.number, call.message) else 0

    def _serve(self, line: _Line, call: Call | ProtocolFault, packet: Packet, pidfd: int | None) -> None:
        if isinstance(call, ProtocolFault):
            self._send(line, answer_fault(call), call.number)
            if not line.has_greeted:
                self._end(line)
            return
        message = call.message
        if isinstance(message, Greeting):
            self._greet(line, call, packet, pidfd)
        elif not line.has_greeted:
            self._send(line, _refuse(message.op, "greet first"), call.number)
            self._end(line)
        elif isinstance(message, Offer):
            self._handler.on_offer(line.number, message, packet.take())
        elif isinstance(message, Holding):
            self._handler.on_holding(line.number, message)
        elif isinstance(message, Farewell):
            self._handler.on_farewell(line.number, message)

    def _greet(self, line: _Line, call: Call, packet: Packet, pidfd: int | None) -> None:
        sent = packet.take()
        if pidfd is None and sent and _is_pidfd(sent[0]):
            # The process has another pid namespace, and the kernel is too old to tell us.
            pidfd = sent.pop(0)
        self._files.close_files(line.uid, sent)
        line.has_greeted = True
        # A greeting resets all counts.
        line.events = 0
        self._note_greeted(line)
        self._handler.on_greeting(line.number, call, line.credentials, pidfd)

    def _send(self, line: _Line, message: ServerMessage, number: int, descriptors: Sequence[int] = ()) -> None:
        data = self._encode(message, number)
        if len(line.queue) >= MAX_QUEUED or not self._has_room(line, len(data)):
            self._end(line)
            return
        line.queue.append((data, tuple(descriptors)))
        self._note_queued(line, len(data))
        if len(line.queue) == 1:
            self._flush(line)

    def _flush(self, line: _Line) -> None:
        self._waiting.pop(line.number, None)
        if line.is_receiving:
            return
        try:
            while line.queue and self._send_next(line):
                pass
        except PacketError:
            self._end(line)
            return
        if line.number in self._lines:
            self._watcher.watch(line.end.fileno(), writes=bool(line.queue) and line.number not in self._waiting)

    def _has_room(self, line: _Line, size_bytes: int) -> bool:
        """Whether so many more bytes may wait until the process reads them."""
        if line.queued_bytes + size_bytes > QUEUED_BYTES:
            return False
        total = self._queued.total() + size_bytes - 1
        return not line.queue or has_share(self._queued[line.uid], total=total, limit=ALL_QUEUED_BYTES)

    def _note_queued(self, line: _Line, size_bytes: int) -> None:
        line.queued_bytes += size_bytes
        self._queued[line.uid] += size_bytes
        if not self._queued[line.uid]:
            del self._queued[line.uid]

    def _send_next(self, line: _Line) -> bool:
        """Sends the line's next packet. False: it has to be tried again, when the line can be written to or, if it is
        in `_waiting`, by the timer."""
        data, descriptors = line.queue[0]
        may_send = not descriptors or self._unread.may_send(line.uid, len(descriptors))
        if not may_send or not line.end.send(data, descriptors):
            if not may_send or line.end.is_crowded:
                self._waiting[line.number] = line
            return False
        line.queue.popleft()
        self._note_queued(line, -len(data))
        if descriptors:
            self._unread.note_sent(line.number, line.uid, line.end, len(descriptors))
            line.close_owned(descriptors)
        return True

    def _end(self, line: _Line) -> None:
        if self._lines.pop(line.number, None) is None:
            return
        self._note_greeted(line)
        self._waiting.pop(line.number, None)
        self._unread.forget(line.number)
        self._note_queued(line, -line.queued_bytes)
        self._users[line.uid] -= 1
        if not self._users[line.uid]:
            # A user who is gone costs nothing.
            del self._users[line.uid]
        del self._by_file[line.end.fileno()]
        if not line.is_receiving:
            self._watcher.unwatch(line.end.fileno())
        self._close_end(line.uid, line.end, is_busy=line.is_receiving)
        line.close_owned(tuple(line.owned))
        self._listen_again()
        if line.has_greeted:
            self._handler.on_end(line.number)

    def _note_greeted(self, line: _Line) -> None:
        """Does not count a lifeline as one that has not greeted any more."""
        lines = self._ungreeted.get(line.uid, {})
        lines.pop(line.number, None)
        if not lines:
            self._ungreeted.pop(line.uid, None)

    def _close_end(self, uid: int, end: PacketSocket, *, is_busy: bool = False, kind: str = _KIND) -> None:
        """Closes a connection: at once if nothing lies in it."""
        end.shut()
        if is_busy or not end.is_empty():
            self._files.close_end(uid, kind, end.close)
        else:
            end.close()

    def _listen_again(self) -> None:
        if self._is_full and self._listener.fileno() != -1:
            self._is_full = False
            self._watcher.watch(self._listener.fileno(), writes=False)

    def _encode(self, message: ServerMessage, number: int) -> bytes:
        return CODEC.encode_answer(message, number=number, boot_id=self._boot_id, channel=Channel.LIFELINE)


def _receive(end: PacketSocket, wanted: int) -> Packet | None:
    """Receives a packet with so many of its descriptors. None: its sender is gone, or sent what it may not."""
    try:
        return end.receive(wanted, drops_rest=True)
    except PacketError:
        return None


def _open_pidfd(pid: int) -> int | None:
    """Opens a pidfd by number. The process has its lifeline open, so the number is still its own."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _is_pidfd(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[pidfd]"


def _refuse(op: int, line: str) -> Error:
    return Error(code=ErrorCode.NOT_GREETED, message=line, about_op=op)
