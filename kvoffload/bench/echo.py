"""The limit of a request: the same bytes there and back between two processes, by the same means, and nothing done."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgpack
import zmq

from kvoffload.bench.child import say_ready
from kvoffload.protocol import Acquire, Acquired
from kvoffload.types import HASH_BYTES

POLL_MS = 250
ADDRESS_BYTES = 8
NUMBER = 1 << 20
LARGE = 1 << 62
"""Session, boot id, deadline and lease are numbers of nine bytes."""


class EchoClient:
    """One connection to an echo server, for one thread."""

    def __init__(self, path: Path | str, blocks: int) -> None:
        """Each request has the bytes of an acquire of so many blocks."""
        self.request = (Acquire.op, NUMBER, LARGE, LARGE, 1, bytes(HASH_BYTES * blocks), 0, 16 * blocks, 1, ())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def call(self) -> object:
        """Packs, sends, waits, unpacks."""
        self._socket.send(msgpack.packb(self.request))
        while not self._poller.poll(POLL_MS):
            pass
        return msgpack.unpackb(self._socket.recv(), use_list=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main(path: str) -> None:
    """Unpacks each request and packs a reply with the bytes of a hit, until it is killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    say_ready()
    while True:
        if poller.poll(POLL_MS):
            connection, frame = router.recv_multipart()
            request = msgpack.unpackb(frame, use_list=False)
            addresses = bytes(len(request[5]) // HASH_BYTES * ADDRESS_BYTES)
            reply = (Acquired.op, NUMBER, LARGE, 0, request[7], LARGE, ((0, addresses, b""),), 0)
            router.send_multipart([connection, msgpack.packb(reply)])
