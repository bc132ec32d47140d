"""The control channel over TCP: a ROUTER of its own, CurveZMQ keys, and the clients that are known by them.

It has a ZeroMQ context, and so a thread, of its own: handshakes cost the engines of this machine no time. Everything is
bounded: connections by the gate, a handshake by its deadline, frames by their size and number.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import zmq
from zmq.utils import z85

from kvoffload.errors import ConfigError, ProtocolError
from kvoffload.server.channels.lifelines import Watcher
from kvoffload.server.channels.tcp_gate import MAX_CONNECTIONS, MAX_UNPROVEN, TcpGate
from kvoffload.server.sessions.session import Guest
from kvoffload.server.sessions.settings import TcpSettings

logger = logging.getLogger(__name__)

FRAME_BYTES = 16 << 10
"""Size limit of a frame from a client, in bytes: an observer has little to say."""
QUEUED_IN = 32
"""Number of frames of one connection that may wait to be received."""
ANSWER_BYTES = 128 << 10
"""Size limit of a frame to a client, in bytes. An event takes up to half of it."""
UNREAD_BYTES = 16 << 20
"""The most bytes that one connection can leave unread; ZeroMQ counts frames. With as many connections as the gate lets
in, one machine can leave 256 MiB unread, and all together 1 GiB."""
QUEUED_OUT = UNREAD_BYTES // ANSWER_BYTES
HEARTBEAT_MS, SILENCE_MS = 10_000, 30_000
REQUESTS_AT_ONCE = 16
"""Key look-ups that are answered before others have their turn."""
DROPPED_AT_ONCE = 16
"""Frames of connections whose key is no longer allowed that are dropped in one turn, before others have theirs."""

_MARK = b"tcp".ljust(512, b"\0")
"""Prefix of the names of TCP connections. The names of connections on the Unix socket are shorter."""
_KEY_BYTES = 40


class RemoteControl:
    """Belongs to the thread of the event loop."""

    def __init__(self, settings: TcpSettings, path: Path, watcher: Watcher) -> None:
        """Listens; `path` is a Unix socket between gate and ROUTER. ConfigError: the address cannot be used."""
        self._settings = settings
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # ZeroMQ must find the look-up socket before the first client can connect.
        self._lookup = self._context.socket(zmq.REP)
        self._lookup.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._bind()
            self._gate = TcpGate(settings.address, path, watcher)
        except BaseException:
            self._close_sockets()
            raise

    @property
    def endpoint(self) -> str:
        return str(self._gate.address)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The sockets for a poller: what `receive` reads, and what `look_up_keys` does."""
        return self._router, self._lookup

    @property
    def gate(self) -> TcpGate:
        return self._gate

    def is_remote(self, connection: bytes) -> bool:
        """Whether a connection came over TCP."""
        return connection.startswith(_MARK)

    def receive(self) -> tuple[bytes, Guest, bytes] | None:
        """Returns the next connection, its guest, and a frame. None: there is none, or not in this turn. A message of
        several parts is returned as an empty frame."""
        for _ in range(DROPPED_AT_ONCE):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            key = self._find_key(parts[-1])
            guest = self._find_guest(key.decode())
            if guest is not None:
                frame = parts[1].bytes if len(parts) == 2 else b""
                return _MARK + key + parts[0].bytes, guest, frame
        return None

    def _find_guest(self, key: str) -> Guest | None:
        """Returns the guest with this key, if there is one. Another thread may remove it between the two steps of
        `get`."""
        try:
            return self._settings.guests.get(key)
        except KeyError:
            return None

    def send(self, connection: bytes, frame: bytes) -> bool:
        """Sends an answer. False: the connection is gone, or has not read what it was sent before. ProtocolError: it is
        too large."""
        if len(frame) > ANSWER_BYTES:
            raise ProtocolError(f"{len(frame)} bytes are too many for a client over TCP")
        try:
            self._router.send_multipart([connection[len(_MARK) + _KEY_BYTES :], frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def look_up_keys(self) -> None:
        """Answers connections that have shown that a key is theirs, by ZeroMQ's protocol for that (RFC 27)."""
        for _ in range(REQUESTS_AT_ONCE):
            try:
                version, number, *_, mechanism, key = self._lookup.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = z85.encode(key)
            is_known = mechanism == b"CURVE" and name.decode() in self._settings.guests
            if not is_known:
                logger.debug("a client with key %s is not let in", name.decode())
            verdict = (b"200", b"", name) if is_known else (b"400", b"this key is not known here", b"")
            with contextlib.suppress(zmq.ZMQError):
                self._lookup.send_multipart([version, number, *verdict, b""], zmq.NOBLOCK)

    def close(self) -> None:
        self._gate.close()
        self._close_sockets()

    def _bind(self) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.BACKLOG, MAX_CONNECTIONS + MAX_UNPROVEN),
            (zmq.MAXMSGSIZE, FRAME_BYTES),
            (zmq.SNDHWM, QUEUED_OUT),
            (zmq.RCVHWM, QUEUED_IN),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.HANDSHAKE_IVL, self._settings.handshake_ms),
            # A machine that was switched off says nothing, not even that it is gone.
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
        ):
            self._router.setsockopt(option, value)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_PUBLICKEY, self._settings.keys.public)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, self._settings.keys.secret)
        # ZeroMQ must not let in a client whose key was not looked up.
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"kvoffload")
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        former = os.umask(0o177)
        try:
            self._router.bind(f"ipc://{self._path}")
        except zmq.ZMQError as fault:
            raise ConfigError(
                f"socket {self._path} cannot be used: {fault.strerror}", remedy="choose another path for the server"
            ) from fault
        finally:
            os.umask(former)

    def _find_key(self, frame: zmq.Frame) -> bytes:
        """Returns a client's key as our own look-up named it. What a client says about itself is not used."""
        return str(frame["User-Id"]).encode()

    def _close_sockets(self) -> None:
        self._router.close(0)
        self._lookup.close(0)
        self._context.term()
        with contextlib.suppress(OSError):
            self._path.unlink()
