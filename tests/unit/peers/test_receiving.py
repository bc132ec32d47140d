"""A message comes in pieces, late, or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvoffload.peers.receiving import receive_exactly

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def test_pieces_are_put_together_and_no_more_is_taken(pair: Pair) -> None:
    here, there = pair
    sender = threading.Thread(target=lambda: [there.sendall(bytes([number])) for number in range(9)])
    sender.start()
    assert receive_exactly(here, 7, time.monotonic() + 60) == bytes(range(7))
    assert receive_exactly(here, 2, time.monotonic() + 60) == bytes([7, 8])
    sender.join()


def test_whoever_hangs_up_is_said_to(pair: Pair) -> None:
    here, there = pair
    there.sendall(b"abc")
    there.close()
    with pytest.raises(ConnectionResetError, match="it has hung up"):
        receive_exactly(here, 4, time.monotonic() + 60)


def test_one_byte_at_a_time_makes_no_more_time(pair: Pair) -> None:
    here, there = pair
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.01):
            there.sendall(b".")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        receive_exactly(here, 1 << 20, time.monotonic() + 0.1)
    is_over.set()
    dripping.join()
