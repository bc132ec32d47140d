"""The server's end of the control channel: one ROUTER socket, frames of bounded size, no reader is waited for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zmq

from kvoffload.errors import ConfigError
from kvoffload.protocol.limits import FRAME_BYTES

QUEUED_FRAMES = 1024
"""Of one connection, in each direction."""
FRAMES_AT_ONCE = 64


class ControlSocket:
    """Belongs to the thread of the event loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], path: Path, *, mode: int = 0o600, group: int | None = None
    ) -> None:
        """ConfigError: the path cannot be used."""
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, FRAME_BYTES),
            (zmq.SNDHWM, QUEUED_FRAMES),
            (zmq.RCVHWM, QUEUED_FRAMES),
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

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next connection and frame; None: there is none. A message of several parts is one without bytes."""
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0], parts[1] if len(parts) == 2 else b""

    def send(self, connection: bytes, frame: bytes) -> bool:
        """False: the connection is gone, or has not read what it was sent before."""
        try:
            self._socket.send_multipart([connection, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
