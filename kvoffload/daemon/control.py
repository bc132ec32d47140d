"""The server's end of the control channel: one ROUTER socket, frames of bounded size, no reader is waited for."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import zmq

from kvoffload.errors import ConfigError
from kvoffload.protocol.limits import FRAME_BYTES

QUEUED_FRAMES = 1024
"""That one connection has not read; beyond it is let go."""
TAKEN_FRAMES = 64
"""Of one connection, 8 MiB each at most, that the server has not come to. Others wait in the sender."""
FRAMES_AT_ONCE = 64
_READABLE = int(zmq.POLLIN)
_MORE = zmq.NOBLOCK | zmq.SNDMORE

_UID = struct.Struct("=I")
_NOBODY = 2**32 - 1


class ControlSocket:
    """Belongs to the thread of the event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        *,
        mode: int = 0o600,
        group: int | None = None,
        tells_users: bool = False,
    ) -> None:
        """With `tells_users` connections of different users are different, whatever they call themselves. That costs a
        microsecond or two for each message. ConfigError: the path cannot be used.
        """
        self.tells_users = tells_users
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, FRAME_BYTES),
            (zmq.SNDHWM, QUEUED_FRAMES),
            (zmq.RCVHWM, TAKEN_FRAMES),
            # Whoever is gone or does not read is told to us, not waited for.
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        self._path = path
        self.endpoint = f"ipc://{path}"
        former = os.umask(0o777 & ~mode)
        try:
            self._socket.bind(self.endpoint)
            if group is not None:
                os.chown(path, -1, group)
        except (zmq.ZMQError, OSError) as fault:
            self._socket.close()
            raise ConfigError(
                f"socket {path} cannot be used: {fault.strerror}", remedy="choose another path of at most 107 bytes"
            ) from fault
        finally:
            os.umask(former)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    @property
    def is_readable(self) -> bool:
        """Whether `receive` will find something; to ask is cheaper than its exception."""
        events = self._socket.get(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & _READABLE)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next connection and frame; None: there is none. A message of several parts is one without bytes."""
        # Part by part is twice as fast as `recv_multipart`.
        try:
            if self.tells_users:
                return self._receive_with_user()
            connection = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        is_whole = not frame.more
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        return connection, frame.bytes if is_whole else b""

    def find_user(self, connection: bytes) -> int:
        """By the kernel's word, where users are told apart."""
        (uid,) = _UID.unpack_from(connection)
        return int(uid)

    def send(self, connection: bytes, frame: bytes) -> bool:
        """False: the connection is gone, or has not read what it was sent before."""
        if self.tells_users:
            connection = connection[_UID.size :]
        try:
            self._socket.send(connection, _MORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _receive_with_user(self) -> tuple[bytes, bytes]:
        parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return _UID.pack(_read_user(parts[-1])) + parts[0].bytes, parts[1].bytes if len(parts) == 2 else b""


def _read_user(frame: zmq.Frame) -> int:
    """ZeroMQ has asked the kernel when the connection was made: `name:uid:gid:pid`."""
    try:
        _, uid, _, _ = str(frame["Peer-Address"]).rsplit(":", 3)
        return int(uid)
    except (KeyError, ValueError):
        return _NOBODY
