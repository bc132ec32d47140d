"""The control channel on all its sockets: the Unix socket, and TCP if the server listens there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import zmq

from kvoffload.errors import ProtocolError
from kvoffload.protocol import Error, ErrorCode, ProtocolFault, ServerMessage
from kvoffload.server.channels.control import FRAMES_AT_ONCE, ControlLimits, ControlSocket
from kvoffload.server.channels.foreign_files import ForeignFiles
from kvoffload.server.channels.lifelines import Watcher
from kvoffload.server.channels.remote_control import RemoteControl
from kvoffload.server.core import ServerCore
from kvoffload.server.long_calls import LongCalls
from kvoffload.server.sessions.outbox import Later, Sendable
from kvoffload.server.sessions.settings import TcpSettings
from kvoffload.wire_codec import CODEC

Send: TypeAlias = Callable[[list[Sendable]], None]
Clock: TypeAlias = Callable[[], int]

logger = logging.getLogger(__name__)

TURN_NS = 2_000_000
"""Nanoseconds after which the loop does something else before it serves more frames."""


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """Where and how to listen. `socket` is the path of the lifelines' socket; the control channels create and remove
    their own files next to it."""

    socket: Path
    boot_id: int
    mode: int = 0o600
    group: int | None = None
    tells_users: bool = False
    """Whether the core is told each connection's user, so that no connection can speak for a session of another user,
    even if it knows the session's number. Set for a server of several domains."""
    remote: TcpSettings | None = None
    """Settings of the TCP channel, or None if the server does not listen on TCP."""
    limits: ControlLimits = field(default_factory=ControlLimits)
    """Bounds of the control channel on the Unix socket."""


class ControlChannels:
    """Belongs to the thread of the event loop."""

    def __init__(self, settings: ChannelSettings, watcher: Watcher, files: ForeignFiles) -> None:
        """Listens. ConfigError: a path or an address cannot be used."""
        self._boot_id = settings.boot_id
        self._tells_users = settings.tells_users
        self._local: ControlSocket | None = None
        self.remote: RemoteControl | None = None
        self._watcher = watcher
        self._long = LongCalls()
        watcher.watch(self.long_file, writes=False)
        try:
            path = settings.socket.with_name(settings.socket.name + ".control")
            self._local = ControlSocket(
                path, files=files, mode=settings.mode, group=settings.group, limits=settings.limits
            )
            if settings.remote is not None:
                inner = settings.socket.with_name(settings.socket.name + ".tcp")
                self.remote = RemoteControl(settings.remote, inner, watcher)
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Returns where it listens on this machine."""
        assert self._local is not None
        return self._local.endpoint

    @property
    def remote_endpoint(self) -> str:
        """Address at which it listens over TCP; empty: it does not."""
        return "" if self.remote is None else self.remote.endpoint

    @property
    def local_file(self) -> int:
        """Descriptor of the local channel for a poller. When it is readable, `serve` has something to do."""
        assert self._local is not None
        return self._local.fileno()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets for a poller; when one is readable, `serve` has something to do."""
        return list(() if self.remote is None else self.remote.sockets)

    def serve(self, ready: object, core: ServerCore, send: Send, clock_ns: Clock) -> None:
        """Serves the frames that have arrived on a socket or the local file, up to a bound."""
        if self._local is not None and ready == self._local.fileno():
            self._serve_local(self._local, core, send, clock_ns)
        elif self.remote is not None:
            self._serve_remote(self.remote, core, send, clock_ns)

    def choose(self, ready: Sequence[int]) -> list[int]:
        """Returns which of these files to serve in this turn of the loop: a bounded number of connections over TCP, and
        all others."""
        return list(ready) if self.remote is None else self.remote.gate.choose(ready)

    def on_ready(self, file: int, *, reads: bool, writes: bool) -> bool:
        """Serves a file that the poller found ready. False: it is none of these."""
        return self.remote is not None and self.remote.gate.on_ready(file, reads=reads, writes=writes)

    @property
    def long_file(self) -> int:
        """Another descriptor to watch. When it is readable, `finish_long` has something to do."""
        return self._long.fileno()

    @property
    def has_long(self) -> bool:
        """Whether an answer is being found on the other thread."""
        return len(self._long) > 0

    def start_long(self, later: Later) -> None:
        """Finds an answer that takes long, on another thread. Later messages of its connection wait for it, and it
        waits for its user's turn."""
        # Clients over TCP have no user on this machine, so all of them share one turn.
        owner = -1 if self._local is None else self._local.find_user(later.connection)
        self._long.start(later, owner=owner)
        if self._local is not None:
            self._local.hold(later.connection)

    def finish_long(self, core: ServerCore, send: Send) -> None:
        """Sends the answers that have been found, and takes frames from their connections again."""
        for later, found in self._long.take_done():
            send(core.finish(later, found.result))
            # The answer may be a callable that takes long, too.
            if self._local is not None and not self._long.is_busy(later.connection):
                self._local.resume(later.connection)
                self._local.leave()

    def tick(self) -> None:
        """Does the channels' periodic work: deadlines, and listening again. The event loop calls it."""
        if self._local is not None:
            self._local.tick()
        if self.remote is not None:
            self.remote.gate.tick()

    def send(self, connection: bytes, message: ServerMessage, number: int) -> bool:
        """Sends an answer. False: the connection is gone, or has not read what it was sent before."""
        try:
            return self._send_one(connection, message, number)
        except ProtocolError as fault:
            logger.error("an answer does not fit: %s", fault)
            error = Error(code=ErrorCode.INTERNAL, message="the answer does not fit a frame")
            return self._send_one(connection, error, number)

    def _send_one(self, connection: bytes, message: ServerMessage, number: int) -> bool:
        frame = CODEC.encode_answer(message, number=number, boot_id=self._boot_id)
        if self.remote is not None and self.remote.is_remote(connection):
            return self.remote.send(connection, frame)
        return self._local is not None and self._local.send(connection, frame)

    def close(self) -> None:
        self._watcher.unwatch(self.long_file)
        self._long.close()
        if self._local is not None:
            self._local.close()
        if self.remote is not None:
            self.remote.close()

    def _serve_local(
        self,
        local: ControlSocket,
        core: ServerCore,
        send: Callable[[list[Sendable]], None],
        clock_ns: Callable[[], int],
    ) -> None:
        local.look()
        end_ns = clock_ns() + TURN_NS
        for _ in range(FRAMES_AT_ONCE):
            received = local.receive()
            if received is None:
                break
            connection, _ = received
            self._serve_frame(*received, core, send, clock_ns)
            if clock_ns() >= end_ns:
                break
            if local.is_unknown(connection) and core.sessions.find_connection(connection) is not None:
                local.trust(connection)
        local.leave()
        for connection in local.take_ended():
            core.close_connection(connection)

    def _serve_frame(self, connection: bytes, frame: bytes, core: ServerCore, send: Send, clock_ns: Clock) -> None:
        assert self._local is not None
        call = CODEC.decode_call(frame)
        if isinstance(call, ProtocolFault):
            send(core.handle_fault(connection, call))
        else:
            uid = self._local.find_user(connection) if self._tells_users else None
            send(core.handle(connection, call, clock_ns(), uid=uid))

    def _serve_remote(
        self,
        remote: RemoteControl,
        core: ServerCore,
        send: Callable[[list[Sendable]], None],
        clock_ns: Callable[[], int],
    ) -> None:
        remote.look_up_keys()
        end_ns = clock_ns() + TURN_NS
        for _ in range(FRAMES_AT_ONCE):
            received = remote.receive()
            if received is None:
                return
            connection, guest, frame = received
            call = CODEC.decode_call(frame)
            if isinstance(call, ProtocolFault):
                send(core.handle_fault(connection, call))
            elif self._long.is_busy(connection):
                send(core.overflow(connection, call))
            else:
                send(core.handle_guest(connection, call, guest, clock_ns()))
            if clock_ns() >= end_ns:
                return
