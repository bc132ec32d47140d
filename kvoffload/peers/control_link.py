"""The control channel to one peer: CurveZMQ, question by question. It identifies both sides, and agrees on links."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field

import zmq

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.key_files import KeyPair
from kvoffload.peers.space_table import PeerSpace
from kvoffload.protocol import (
    Answer,
    ClientMessage,
    Done,
    Error,
    Hello,
    HelloAccepted,
    Introduce,
    LinkOpened,
    OpenLink,
    ServerMessage,
)
from kvoffload.protocol.message import PROTOCOL_MAX, PROTOCOL_MIN
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.wire_codec import CODEC

logger = logging.getLogger(__name__)

CAPABILITY = "peer"
_FRAME_BYTES = 1 << 20
_THREADS = 2
"""Number of threads that ZeroMQ starts for a context."""


@dataclass(frozen=True, kw_only=True)
class ControlSettings:
    """The settings with which one peer is reached."""

    address: TcpAddress
    peer_key: str
    """The peer's public key, as `kvoffload keys show` prints it."""
    keys: KeyPair
    """This server's own keys."""
    domain: str = ""
    timeout_s: float = 1.0


@dataclass(frozen=True)
class LinkTicket:
    """The address for data links, and the token and secret with which they begin."""

    address: TcpAddress
    token: bytes
    secret: bytes = field(repr=False)


class ControlLink:
    """Safe to use from any thread; each question waits for the one before. StoreFaultError: no good answer in time."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        """Kept until the link is closed: for a new one ZeroMQ starts threads, and ends the process if it cannot."""
        self._socket: zmq.Socket[bytes] | None = None
        self._asked = 0
        self._ticket: LinkTicket | None = None
        self._failed_s = -1.0
        self._fault = ""
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False

    def find_ticket(self, *, is_sealed: bool) -> LinkTicket:
        """Returns a ticket that was good a while ago, or else a new one."""
        begun_s = time.monotonic()
        with self._lock:
            if self._ticket is None:
                if self._failed_s >= begun_s:
                    raise StoreFaultError(self._fault)  # another call failed meanwhile: no second timeout
                opened = self._ask(OpenLink(is_sealed=is_sealed))
                if not isinstance(opened, LinkOpened):
                    self._hang_up()
                    raise StoreFaultError(f"the peer at {self._settings.address}: {_describe(opened)}")
                address = TcpAddress(self._settings.address.host, opened.port)
                self._ticket = LinkTicket(address, opened.token, opened.secret)
            return self._ticket

    def forget_ticket(self, ticket: LinkTicket) -> None:
        """Forgets a ticket that the peer does not know any more."""
        with self._lock:
            if self._ticket is ticket:
                self._ticket = None

    def introduce(self, space: PeerSpace) -> bool:
        """Names an identity whose records will come. False: the peer knows it as another one, or has no room for it."""
        geometry = space.geometry
        message = Introduce(
            fingerprint=space.fingerprint, hash_block_size=geometry.hash_block_size, groups=geometry.group_settings()
        )
        with self._lock:
            answer = self._ask(message)
        if isinstance(answer, Done):
            return True
        logger.warning("the peer at %s takes no records of an identity: %s", self._settings.address, _describe(answer))
        return False

    def close(self) -> None:
        """Hangs up: no thread waits for an answer any more. Calling it again has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._closing, 1)
        with self._lock:
            self._hang_up()
            os.close(self._closing)
            if self._context is not None:
                self._context.term()

    def _ask(self, message: ClientMessage) -> ServerMessage:
        try:
            if self._is_closed:
                raise StoreFaultError("closed")
            if self._socket is None:
                self._connect()
            return self._exchange(message)
        except (zmq.ZMQError, StoreFaultError) as fault:
            self._hang_up()
            self._failed_s = time.monotonic()
            self._fault = f"the peer at {self._settings.address}: {fault}"
            raise StoreFaultError(self._fault) from fault

    def _connect(self) -> None:
        settings = self._settings
        if self._context is None:
            if not _can_start_threads(_THREADS):
                raise StoreFaultError("no thread can be started for it")
            self._context = zmq.Context(io_threads=1)
        made = self._socket = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, _FRAME_BYTES)
        made.setsockopt(zmq.IPV6, int(settings.address.is_version_6))
        made.setsockopt(zmq.CURVE_SERVERKEY, settings.peer_key.encode())
        made.setsockopt(zmq.CURVE_PUBLICKEY, settings.keys.public)
        made.setsockopt(zmq.CURVE_SECRETKEY, settings.keys.secret)
        made.connect(str(settings.address))
        self._asked = 0
        hello = Hello(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, capabilities=(CAPABILITY,), domain=settings.domain
        )
        answer = self._exchange(hello)
        if not isinstance(answer, HelloAccepted):
            raise StoreFaultError(_describe(answer))
        if CAPABILITY not in answer.capabilities:
            raise StoreFaultError("it serves no peers: set peer_listen there")

    def _exchange(self, message: ClientMessage) -> ServerMessage:
        assert self._socket is not None
        self._asked += 1
        self._socket.send(CODEC.encode_call(message, number=self._asked, session=0), zmq.NOBLOCK)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._closing, zmq.POLLIN)
        end_s = time.monotonic() + self._settings.timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            ready = dict(poller.poll(max(int(left_s * 1000), 1)))
            if self._socket not in ready:
                break
            answer = CODEC.decode_answer(self._socket.recv(zmq.NOBLOCK))
            if isinstance(answer, Answer) and answer.number == self._asked:
                return answer.message
        raise StoreFaultError("no answer in time, or it does not know our key")

    def _hang_up(self) -> None:
        self._ticket = None
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None


def _describe(answer: ServerMessage) -> str:
    return answer.message if isinstance(answer, Error) else f"it answers {type(answer).__name__}"


def _can_start_threads(count: int) -> bool:
    """Whether so many more threads can run at once now."""
    is_over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_over.wait, name="kvoffload-probe", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        is_over.set()
        for thread in started:
            thread.join()
    return True
