"""All bytes go there and come back, whatever the pieces."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from kvoffload.bench.raw_socket import RawSocket, receive_pieces, send_pieces
from kvoffload.errors import BenchmarkError


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 1 << 20])
def test_pieces_make_the_whole(piece_bytes: int) -> None:
    sent = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    come = np.zeros_like(sent)
    one, other = socket.socketpair()
    thread = threading.Thread(target=send_pieces, args=(one, memoryview(sent.data), piece_bytes))
    thread.start()
    receive_pieces(other, memoryview(come.data), piece_bytes)
    thread.join()
    assert np.array_equal(sent, come)
    one.close()
    with pytest.raises(BenchmarkError, match="gone"):
        receive_pieces(other, memoryview(come.data), piece_bytes)
    other.close()


def test_a_child_takes_and_gives() -> None:
    memory = np.zeros(100_000, np.uint8)
    with RawSocket(memory) as raw:
        assert raw.send(4096) > 0
        assert raw.receive(4096) > 0
    assert (memory == 0).all(), "it gives back what it was given"
