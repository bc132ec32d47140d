"""Unix packets that carry descriptors, and the credentials of the other end: the base of a lifeline.

A packet arrives whole or not at all, in order, and its descriptors with it. Nothing here blocks, and nothing is read
beyond what was declared: a packet that is too long, or that has more descriptors than it may, is a fault, and all
descriptors that came with it are closed.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from kvoffload import native
from kvoffload.errors import PacketError

MAX_PACKET_BYTES = 64 << 10
MAX_DESCRIPTORS = 253
"""SCM_MAX_FD of the kernel."""

_INT = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD, _SO_PASSRIGHTS = 77, 83
"""The numbers of these options of Linux 6.5 and 6.16; Python has no names for them."""


@dataclass(frozen=True)
class Credentials:
    """As the kernel knows them, of when the other end connected."""

    pid: int
    uid: int
    gid: int


class Peeked(NamedTuple):
    """The bytes of a packet that has not been received yet, and whether descriptors come with it."""

    data: bytes
    has_descriptors: bool


@dataclass
class Packet:
    """A received packet. Descriptors that were not taken are closed with it."""

    data: bytes
    descriptors: list[int] = field(default_factory=list)

    def take(self) -> list[int]:
        """The descriptors, which are the caller's from now on."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def close(self) -> None:
        close_all(self.take())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class PacketSocket:
    """One end of a connection. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket, which must be a connected SOCK_SEQPACKET one."""
        connected.setblocking(False)
        self._socket = connected
        self.is_crowded = False
        """The last `send` failed because a resource of the kernel ran out, and not the room of this socket: try again
        after a while, though the socket is writable."""

    def fileno(self) -> int:
        """Returns the file for a poller; -1 once closed."""
        return self._socket.fileno()

    def credentials(self) -> Credentials:
        """Returns who is at the other end. PacketError: the kernel does not say."""
        try:
            found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError as fault:
            raise PacketError(f"the credentials of the other end cannot be had: {fault.strerror}") from fault
        return Credentials(*_CREDENTIALS.unpack(found))

    def open_pidfd(self) -> int | None:
        """Of the process at the other end, without a doubt which one that is; None before Linux 6.5."""
        try:
            found = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT)
        except OSError:
            return None
        (descriptor,) = array.array("i", found)
        return int(descriptor)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Sends a packet. False: the other end has not read what it was sent before; try again when this can be written
        to, unless it `is_crowded`.

        The descriptors stay the caller's. PacketError: the other end is gone.
        """
        if not 0 < len(data) <= MAX_PACKET_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(
                f"a packet has 1 to {MAX_PACKET_BYTES} bytes and at most {MAX_DESCRIPTORS} descriptors, "
                f"not {len(data)} and {len(descriptors)}"
            )
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.is_crowded = False
        try:
            self._socket.sendmsg([data], beside, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as fault:
            # ETOOMANYREFS: more descriptors are in flight than this user may have; they arrive, and then it works.
            if fault.errno in (errno.ENOBUFS, errno.ETOOMANYREFS):
                self.is_crowded = True
                return False
            raise PacketError(f"a packet cannot be sent: {fault.strerror}") from fault
        return True

    def count_unread_bytes(self) -> int:
        """Returns how many bytes the other end has not read yet, as the kernel counts them."""
        found = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, found)
        return found[0]

    def peek(self) -> Peeked | None:
        """The next packet, which stays; None: there is none yet. No bytes: `receive` says why."""
        try:
            data, _, flags, _ = self._socket.recvmsg(MAX_PACKET_BYTES, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return Peeked(b"", has_descriptors=False)
        return Peeked(data, has_descriptors=bool(flags & socket.MSG_CTRUNC))

    def shut(self) -> None:
        """Ends the connection. Packets that have come stay until they are received, or this end is closed."""
        shut(self._socket)

    def is_empty(self) -> bool:
        """Whether no packet is left, once it is shut. If one is, closing may take as long as its sender likes, because
        a descriptor may lie in it."""
        return is_empty(self._socket)

    def receive(self, most_descriptors: int = MAX_DESCRIPTORS, *, drops_rest: bool = False) -> Packet | None:
        """Returns the next packet. None: there is none yet. PacketError: the other end is gone, or sent what it may
        not.

        With `drops_rest` more descriptors than there may be are no fault: the kernel lets go of them, and they were
        never this process's.
        """
        # One byte more shows a packet that is too long. All descriptors have room, or the kernel would drop some.
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT)
        if drops_rest:
            room = socket.CMSG_LEN(most_descriptors * _INT) if most_descriptors else 0
        try:
            data, beside, flags, _ = self._socket.recvmsg(
                MAX_PACKET_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError as fault:
            raise PacketError(f"the other end is gone: {fault.strerror}") from fault
        packet = Packet(data, _read_descriptors(beside))
        if not data and not packet.descriptors:
            raise PacketError("the other end has closed the connection")
        wrong = _find_fault(packet, flags & ~socket.MSG_CTRUNC if drops_rest else flags, most_descriptors)
        if wrong:
            packet.close()
            raise PacketError(wrong)
        return packet

    def close(self) -> None:
        self._socket.close()


def refuse_descriptors(end: socket.socket) -> bool:
    """Makes the kernel refuse to send descriptors to this Unix socket, or if it listens to those that it accepts.
    Returns False before Linux 6.16, which cannot do that."""
    try:
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def shut(end: socket.socket) -> None:
    """Ends a connection. What has come stays until it is received, or this end is closed."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def accept_open(listener: socket.socket) -> socket.socket | None:
    """Accepts the next connection that its other end has not closed meanwhile; others are let go of. None: there is
    none for now. OSError: it cannot be accepted, as when this process has no descriptor left for it."""
    number = native.accept_open(listener.fileno())
    if number == -errno.EAGAIN:
        return None
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    accepted = socket.socket(listener.family, listener.type, listener.proto, fileno=number)
    accepted.setblocking(False)
    return accepted


def is_empty(end: socket.socket) -> bool:
    """Whether all was received that came over a Unix socket, once that is shut."""
    try:
        # With this option the kernel adds a credential to each packet, by which one without bytes is told from the end
        # of the connection. In a stream there are no such packets.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        data, beside, _, _ = end.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), flags)
    except OSError:
        return False
    return not data and (end.type == socket.SOCK_STREAM or not beside)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _find_fault(packet: Packet, flags: int, most_descriptors: int) -> str:
    if len(packet.data) > MAX_PACKET_BYTES or flags & socket.MSG_TRUNC:
        return f"a packet is longer than {MAX_PACKET_BYTES} bytes"
    if flags & socket.MSG_CTRUNC:
        return "descriptors were lost: this process has as many open as it may"
    if len(packet.descriptors) > most_descriptors:
        return f"a packet has {len(packet.descriptors)} descriptors, allowed are {most_descriptors}"
    return "" if packet.data else "a packet has no bytes"


def _read_descriptors(beside: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // _INT * _INT
            found += array.array("i", data[:whole]).tolist()
    return found


class ReceivedDescriptor:
    """A descriptor that came with a message. It is closed unless it was taken, with this object at the latest."""

    def __init__(self, number: int) -> None:
        self._number = number

    def take(self) -> int:
        """The descriptor, which is the caller's from now on."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Closes the descriptor, if it was neither taken nor closed before."""
        number = self.take()
        if number >= 0:
            close_all([number])

    def __del__(self) -> None:
        self.close()
