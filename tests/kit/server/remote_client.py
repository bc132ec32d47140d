"""A client over TCP for tests: ZeroMQ, a key or none, message by message."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from kvoffload.key_files import KeyPair
from kvoffload.protocol import CAPABILITIES, CODEC, Answer, ClientMessage, Hello, HelloAccepted, ServerMessage

TIMEOUT_S = 30.0


def make_keys() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


class RemoteClient:
    """`turn` lets the server work, where that runs on the same thread; None: it does so elsewhere."""

    def __init__(
        self,
        endpoint: str,
        *,
        keys: KeyPair | None = None,
        server_key: bytes = b"",
        turn: Callable[[], object] | None = None,
    ) -> None:
        self._turn = turn
        self._requests = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        self.socket.connect(endpoint)

    def hello(self, domain: str = "") -> HelloAccepted:
        capabilities = tuple(sorted(CAPABILITIES))
        answer = self.ask(Hello(protocol_min=1, protocol_max=1, capabilities=capabilities, domain=domain))
        assert isinstance(answer, HelloAccepted), answer
        return answer

    def ask(self, message: ClientMessage) -> ServerMessage:
        self._requests += 1
        self.socket.send(CODEC.encode_call(message, number=self._requests, session=0))
        return self.receive()

    def receive(self) -> ServerMessage:
        self._await(self.socket)
        answer = CODEC.decode_answer(self.socket.recv())
        assert isinstance(answer, Answer)
        return answer.message

    def is_refused(self) -> bool:
        """Whether the server does not know its key; waits until that is certain."""
        self._await(self.events)
        event = int.from_bytes(self.events.recv_multipart()[0][:2], "little")
        return event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end
            if self._turn is not None:
                self._turn()

    def _await(self, source: zmq.Socket[bytes]) -> None:
        """Waits until something has come at `source`."""
        if self._turn is None:
            assert source.poll(int(TIMEOUT_S * 1000))
        else:
            self.wait(lambda: bool(source.poll(0)))

    def close(self) -> None:
        """Once or more often."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)
        self._context.term()
