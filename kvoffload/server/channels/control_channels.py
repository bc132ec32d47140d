"""The control channel in all its ways: a Unix socket, and TCP if anybody may come that way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import zmq

from kvoffload.errors import ProtocolError
from kvoffload.protocol import Error, ErrorCode, ProtocolFault, ServerMessage
from kvoffload.server.channels.control import FRAMES_AT_ONCE, ControlLimits, ControlSocket
from kvoffload.server.channels.lifelines import Watcher
from kvoffload.server.channels.remote_control import RemoteControl
from kvoffload.server.core import ServerCore
from kvoffload.server.long_calls import LongCalls
from kvoffload.server.outbox import Later, Sendable
from kvoffload.server.terms import RemoteTerms
from kvoffload.wire_codec import CODEC

Send: TypeAlias = Callable[[list[Sendable]], None]
Clock: TypeAlias = Callable[[], int]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChannelTerms:
    """`socket` is that of the lifelines; files beside it are made and removed."""

    socket: Path
    boot_id: int
    mode: int = 0o600
    group: int | None = None
    tells_users: bool = False
    """For a server of several domains: nobody speaks for a session of another user, even one that knows its number."""
    remote: RemoteTerms | None = None
    """None: nobody comes over TCP."""
    limits: ControlLimits = field(default_factory=ControlLimits)
    """Of the Unix socket."""


class ControlChannels:
    """Belongs to the thread of the event loop."""

    def __init__(self, terms: ChannelTerms, watcher: Watcher) -> None:
        """Listens. ConfigError: a path or an address cannot be used."""
        self._boot_id = terms.boot_id
        self._tells_users = terms.tells_users
        self._local: ControlSocket | None = None
        self.remote: RemoteControl | None = None
        self._watcher = watcher
        self._long = LongCalls()
        watcher.watch(self.long_file, writes=False)
        try:
            path = terms.socket.with_name(terms.socket.name + ".control")
            self._local = ControlSocket(path, mode=terms.mode, group=terms.group, limits=terms.limits)
            if terms.remote is not None:
                inner = terms.socket.with_name(terms.socket.name + ".tcp")
                self.remote = RemoteControl(terms.remote, inner, watcher)
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
        """Where it listens over TCP; empty: nowhere."""
        return "" if self.remote is None else self.remote.endpoint

    @property
    def local_file(self) -> int:
        """The local channel's file for a poller; when it is readable, `serve` has something to do."""
        assert self._local is not None
        return self._local.fileno()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets for a poller; when one is readable, `serve` has something to do."""
        return list(() if self.remote is None else self.remote.sockets)

    def serve(self, ready: object, core: ServerCore, send: Send, clock_ns: Clock) -> None:
        """What has come on a socket or the local file, up to a bound."""
        if self._local is not None and ready == self._local.fileno():
            self._serve_local(self._local, core, send, clock_ns)
        elif self.remote is not None:
            self._serve_remote(self.remote, core, send, clock_ns)

    def on_ready(self, file: int, *, reads: bool, writes: bool) -> bool:
        """A file is ready that was asked to be watched. False: it is none of these."""
        return self.remote is not None and self.remote.gate.on_ready(file, reads=reads, writes=writes)

    @property
    def long_file(self) -> int:
        """A file to be watched too; when it is readable, `finish_long` has something to do."""
        return self._long.fileno()

    @property
    def has_long(self) -> bool:
        """An answer is being found."""
        return len(self._long) > 0

    def start_long(self, later: Later) -> None:
        """Finds an answer that takes long: its connection's later messages wait for it, and it for its user's turn."""
        # Whoever comes over TCP is nobody of this machine, and they share one turn.
        owner = -1 if self._local is None else self._local.find_user(later.connection)
        self._long.start(later, owner=owner)

    def finish_long(self, core: ServerCore, send: Send, clock_ns: Clock) -> None:
        """Answers that are found, and what came behind them."""
        for later, found in self._long.take_done():
            send(core.finish(later, found.result))
            while (frame := self._long.take_waiting(later.connection)) is not None:
                self._serve_frame(later.connection, frame, core, send, clock_ns)

    def tick(self) -> None:
        """Is called now and then."""
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
        for _ in range(FRAMES_AT_ONCE):
            received = local.receive()
            if received is None:
                break
            connection, _ = received
            self._serve_frame(*received, core, send, clock_ns)
            if local.is_unknown(connection) and core.sessions.find_connection(connection) is not None:
                local.trust(connection)
        local.leave()
        for connection in local.take_ended():
            core.close_connection(connection)

    def _serve_frame(self, connection: bytes, frame: bytes, core: ServerCore, send: Send, clock_ns: Clock) -> None:
        assert self._local is not None
        is_busy = self._long.is_busy(connection)
        if is_busy and self._long.wait(connection, frame, owner=self._local.find_user(connection)):
            return
        call = CODEC.decode_call(frame)
        if isinstance(call, ProtocolFault):
            send(core.handle_fault(connection, call))
        elif is_busy:
            send(core.overflow(connection, call))
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
