"""The client's end of the control channel: a Unix socket on which it speaks ZMTP, as a DEALER of ZeroMQ does.

ZeroMQ itself is not used in an engine's process, because it ends a process that cannot have a descriptor or a thread.
"""

from __future__ import annotations

import socket

from kvoffload.errors import PacketError
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.zmtp import GREETING, ZmtpReader, pack_head

MAX_UNSENT_BYTES = 4 << 20
"""The most bytes that may wait until the server takes them. Beyond it nothing more is sent."""
_AT_ONCE_BYTES = 64 << 10
_SCHEME = "ipc://"


class ControlEnd:
    """One connection. Its user holds the link's lock; nothing waits."""

    def __init__(self, endpoint: str) -> None:
        """Connects. OSError: that is not possible, or not at once."""
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_UNIX, kind)
        try:
            self._socket.connect(endpoint.removeprefix(_SCHEME))
        except OSError:
            self._socket.close()
            raise
        self._reader = ZmtpReader(frame_bytes=FRAME_BYTES, kind=b"DEALER")
        self._unsent = bytearray(GREETING)
        self._held: bytearray | None = bytearray()
        """Messages for a server whose greeting has not come yet; None: it has."""

    @property
    def has_unsent(self) -> bool:
        """Whether data waits until the socket can be written to."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Sends a message, or keeps it until `flush` can send it. False: the connection has ended, or the server takes
        nothing."""
        waiting = self._unsent if self._held is None else self._held
        if len(waiting) + len(frame) > MAX_UNSENT_BYTES:
            return False
        waiting += pack_head(len(frame))
        waiting += frame
        return self.flush()

    def flush(self) -> bool:
        """Sends what the socket takes now. False: the connection has ended."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        """Returns the next message; None: there is none yet. PacketError: the connection has ended, or the server sent
        what it may not."""
        while True:
            frame = self._reader.take()
            reply = self._reader.take_reply()
            if len(self._unsent) > 2 * MAX_UNSENT_BYTES:
                raise PacketError("the server asks and does not read")
            self._unsent += reply
            if reply and self._held is not None:
                self._unsent += self._held
                self._held = None
            if frame is not None:
                return frame
            try:
                data = self._socket.recv(_AT_ONCE_BYTES)
            except BlockingIOError:
                return None
            except OSError as fault:
                raise PacketError(f"the channel has ended: {fault.strerror}") from fault
            if not data:
                raise PacketError("the server has closed the channel")
            self._reader.feed(memoryview(data))

    def close(self) -> None:
        self._socket.close()
