"""The limit of records over a network: the same bytes over one plain TCP connection between two processes."""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvoffload.bench.child import Child, say_ready
from kvoffload.errors import BenchmarkError

_COMMAND = struct.Struct("<cQQ")
_TAKE, _GIVE, _DONE = b"t", b"g", b"d"


class RawSocket:
    """One connection to a child that takes and gives bytes."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """Takes the memory that is sent, and into which received bytes go. The child has as much."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._child = Child("kvoffload.bench.raw_socket", listener.getsockname()[1], len(memory))
            self._end, _ = listener.accept()
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(memory.data)

    def send(self, piece_bytes: int) -> float:
        """Seconds until the child has all of the memory, given to the system in such pieces."""
        begun = time.perf_counter()
        self._end.sendall(_COMMAND.pack(_TAKE, len(self._memory), piece_bytes))
        send_pieces(self._end, self._memory, piece_bytes)
        if self._end.recv(1) != _DONE:
            raise BenchmarkError("the other process has not taken all")
        return time.perf_counter() - begun

    def receive(self, piece_bytes: int) -> float:
        """Seconds until as much has come from the child."""
        begun = time.perf_counter()
        self._end.sendall(_COMMAND.pack(_GIVE, len(self._memory), piece_bytes))
        receive_pieces(self._end, self._memory, piece_bytes)
        return time.perf_counter() - begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        self._child.close()


def send_pieces(end: socket.socket, memory: memoryview, piece_bytes: int) -> None:
    for at in range(0, len(memory), piece_bytes):
        end.sendall(memory[at : at + piece_bytes])


def receive_pieces(end: socket.socket, memory: memoryview, piece_bytes: int) -> None:
    """Each as far as it has come. BenchmarkError: the other side is gone."""
    for at in range(0, len(memory), piece_bytes):
        left = memory[at : at + piece_bytes]
        while left:
            got = end.recv_into(left)
            if not got:
                raise BenchmarkError("the other process is gone")
            left = left[got:]


def main(port: str, memory_bytes: str) -> None:
    """Runs in the child until its parent hangs up."""
    end = socket.create_connection(("127.0.0.1", int(port)))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(np.ones(int(memory_bytes), np.uint8).data)
    say_ready()
    with end:
        while command := end.recv(_COMMAND.size, socket.MSG_WAITALL):
            what, size, piece_bytes = _COMMAND.unpack(command)
            if what == _TAKE:
                receive_pieces(end, memory[:size], piece_bytes)
                end.sendall(_DONE)
            else:
                send_pieces(end, memory[:size], piece_bytes)
