"""Answers of every kind, cut anywhere; what makes no sense or takes too long is a fault in one line."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.tiers.envelope import pack_heads
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import ErrorAnswer, RespConnection, pack_command, read_count
from tests.kit.tiers.tier_contract import Records

LARGE = bytes(range(256)) * 1200


class Peer:
    """The other end: it sends the bytes that the test gives it, and notes those that it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.end: socket.socket | None = None

    def connect(self, timeout_s: float = 30.0) -> RespConnection:
        connection = RespConnection("127.0.0.1", self.port, timeout_s=timeout_s)
        self.end, _ = self._listener.accept()
        self.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def say(self, *pieces: bytes) -> None:
        assert self.end is not None
        for piece in pieces:
            self.end.sendall(piece)

    def close(self) -> None:
        self._listener.close()
        if self.end is not None:
            self.end.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_a_command_is_packed() -> None:
    assert pack_command(b"SET", memoryview(b"key"), b"") == b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$0\r\n\r\n"


def test_answers_may_be_cut_anywhere(peer: Peer) -> None:
    connection = peer.connect()
    text = b"+OK\r\n:-7\r\n$5\r\na\r\nbc\r\n$-1\r\n-ERR no\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n*-1\r\n"
    wanted = [b"OK", -7, b"a\r\nbc", None, ErrorAnswer("ERR no"), [1, [b""]], None]
    for cut in range(1, len(text)):
        peer.say(text[:cut], text[cut:])
        assert [connection.read_answer() for _ in wanted] == wanted
    connection.close()


def test_lines_are_read_together(peer: Peer) -> None:
    connection = peer.connect()
    lines = [b":%d" % number for number in range(20_000)]
    teller = threading.Thread(target=peer.say, args=[b"".join(line + b"\r\n" for line in [*lines, b"+next", b"-no"])])
    teller.start()
    assert connection.read_lines(0) == []
    assert connection.read_lines(20_000) == lines
    assert connection.read_lines(1) == [b"+next"]
    assert connection.read_answer() == ErrorAnswer("no")
    teller.join()
    connection.close()


def test_the_shortest_lines_are_read_however_they_are_cut(peer: Peer) -> None:
    connection = peer.connect()
    text = b"+\r\n" * 50
    for cut in range(1, len(text)):
        peer.say(text[:cut], text[cut:])
        assert connection.read_lines(50) == [b"+"] * 50
    connection.close()


def test_large_values_go_out_of_and_come_into_memory_that_lasts(peer: Peer) -> None:
    connection = peer.connect()
    sender = threading.Thread(
        target=connection.send, args=[[b"$%d\r\n" % len(LARGE), memoryview(LARGE), b"\r\n"] * 300]
    )
    sender.start()
    assert peer.end is not None
    wanted = (b"$%d\r\n" % len(LARGE) + LARGE + b"\r\n") * 300
    got = bytearray()
    while len(got) < len(wanted):
        got += peer.end.recv(1 << 20)
    sender.join()
    assert got == wanted
    teller = threading.Thread(target=peer.say, args=[wanted])
    teller.start()
    head, rest = bytearray(10), bytearray(len(LARGE) - 10)
    for _ in range(300):
        assert connection.read_size() == len(LARGE)
        connection.read_into(memoryview(head), memoryview(rest))
        assert head + rest == LARGE
    teller.join()
    connection.close()


@pytest.mark.parametrize("size", [0, 5, 100, 200_000])
def test_of_a_value_that_is_too_long_the_beginning_is_kept(peer: Peer, size: int) -> None:
    connection = peer.connect()
    value = bytes(range(250)) * 800
    peer.say(b"$%d\r\n%b\r\n+OK\r\n" % (size, value[:size]))
    assert connection.read_size() == size
    assert connection.read_beginning(size, 100) == value[: min(size, 100)]
    assert connection.read_answer() == b"OK"
    connection.close()


def test_records_come_to_their_slots_up_to_another_answer(peer: Peer) -> None:
    connection = peer.connect()
    written, read = (Records(0, 3, 1000, filled=is_filled) for is_filled in (True, False))
    heads = pack_heads(written.names, 1000, written.digests, written.parents)
    values = [head.tobytes() + record.tobytes() for head, record in zip(heads, written.memory, strict=True)]
    said = [b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    peer.say(b"+OK\r\n" + said[0][:50], said[0][50:] + b"$-1\r\n" + said[1])
    assert connection.read_answer() == b"OK"
    came = connection.read_records(read.names, read.slots, 1000)
    assert came.are(read.names.choose(np.arange(1)), 1000).tolist() == [True]
    assert connection.read_size() is None
    peer.say(said[2], b":5\r\n")
    rest = np.arange(1, 3)
    came = connection.read_records(read.names.choose(rest), read.slots[rest], 1000)
    assert came.are(read.names.choose(rest), 1000).tolist() == [True, True]
    assert came.parents.tobytes() == written.parents[32:]
    assert np.array_equal(read.memory, written.memory)
    assert connection.read_answer() == 5
    connection.close()


def test_records_of_which_one_does_not_end_as_it_should_are_a_fault(peer: Peer) -> None:
    records = Records(0, 1, 10, filled=False)
    value = b"$146\r\n" + bytes(146)
    connection = peer.connect(timeout_s=0.02)
    peer.say(value)
    with pytest.raises(StoreFaultError, match=r"no answer within 0\.02 s"):
        connection.read_records(records.names, records.slots, 10)
    connection.close()
    connection = peer.connect()
    peer.say(value + b"+OK\r\n")
    with pytest.raises(StoreFaultError, match="it does not speak as it should: a value without an end"):
        connection.read_records(records.names, records.slots, 10)
    connection.close()
    connection = peer.connect()
    peer.say(value)
    peer.close()
    with pytest.raises(StoreFaultError, match="it has hung up"):
        connection.read_records(records.names, records.slots, 10)
    connection.close()


def test_a_missing_value_and_an_error_are_told_apart(peer: Peer) -> None:
    connection = peer.connect()
    peer.say(b"$-1\r\n-MOVED 5 far:1\r\n")
    assert connection.read_size() is None
    moved = connection.read_size()
    assert isinstance(moved, ErrorAnswer)
    assert moved.code == "MOVED"
    connection.close()


def test_an_error_is_one_line_however_long_it_is(peer: Peer) -> None:
    connection = peer.connect()
    peer.say(b"-ERR no\nan entry \x1b[1m" + b"x" * 60_000 + b"\r\n")
    peer.say(b"-ERR a\rb\r\n")
    for answer, begin in ((connection.read_answer(), "ERR no an entry [1mxx"), (connection.read_size(), "ERR a b")):
        assert isinstance(answer, ErrorAnswer)
        assert answer.text.startswith(begin)
        assert answer.text.isprintable()
        assert len(answer.text) <= 300


@pytest.mark.parametrize("is_list", [True, False])
def test_many_answers_that_come_bit_by_bit_have_no_more_time_than_one(peer: Peer, is_list: bool) -> None:
    connection = peer.connect(timeout_s=0.3)

    def dribble() -> None:
        with contextlib.suppress(OSError):
            peer.say(b"*600\r\n" if is_list else b"")
            for _ in range(600):
                peer.say(b":1\r\n")
                is_over.wait(0.01)

    is_over = threading.Event()
    teller = threading.Thread(target=dribble)
    teller.start()
    with pytest.raises(StoreFaultError, match=r"no answer within 0\.3 s"):
        connection.read_answer() if is_list else connection.read_lines(600)
    connection.close()
    is_over.set()
    teller.join()


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n",
        b"$many\r\n",
        b":\r\n",
        b":1_000\r\n",
        b":\xd9\xa3\r\n",
        b":" + b"9" * 5000 + b"\r\n",
        b"*x\r\n",
        b"$999999999999\r\n",
        b"*1\r\n" * 20 + b":1\r\n",
        b"+" + bytes(70_000),
        b"$16777216\r\n",
    ],
)
def test_nonsense_is_a_fault_in_one_line(peer: Peer, said: bytes) -> None:
    connection = peer.connect()
    peer.say(said)
    with pytest.raises(StoreFaultError, match="it does not speak as it should") as fault:
        connection.read_answer()
    assert "\n" not in str(fault.value)
    connection.close()


@pytest.mark.parametrize("text", [b"", b"-1", b"10~", b" 1", b"1_0", b"1" * 5000, b"\xff"])
def test_a_count_that_is_none_is_the_stores_fault(text: bytes) -> None:
    with pytest.raises(StoreFaultError, match="it does not speak as it should") as fault:
        read_count(text)
    assert len(str(fault.value)) < 200
    assert read_count(b"18446744073709551615") == 2**64 - 1


@pytest.mark.parametrize(
    "address", [("127.0.0.1", 2**40), ("127.0.0.1", -1), ("a\0b", 1), ("x" * 100 + ".y", 1), ("..", 1)]
)
def test_an_address_that_is_none_is_a_fault_in_one_line(address: tuple[str, int]) -> None:
    """A node of a cluster told it."""
    with pytest.raises(StoreFaultError) as fault:
        RespConnection(*address, timeout_s=30.0)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "said",
    [b"*2\r\n" + b"$9000000\r\n%b\r\n" % bytes(9_000_000) * 2, b"*1000000\r\n" + b":1\r\n" * 300_000],
    ids=["values", "elements"],
)
def test_an_answer_takes_no_more_memory_than_it_may(peer: Peer, said: bytes) -> None:
    connection = peer.connect()

    def tell() -> None:
        with contextlib.suppress(OSError):
            peer.say(said)

    teller = threading.Thread(target=tell)
    teller.start()
    with pytest.raises(StoreFaultError, match="an answer of more than 16777216 bytes"):
        connection.read_answer()
    connection.close()
    teller.join()


def test_whoever_says_nothing_is_not_waited_for(peer: Peer) -> None:
    connection = peer.connect(timeout_s=0.02)
    for read in (connection.read_answer, connection.read_size, lambda: connection.read_lines(1)):
        with pytest.raises(StoreFaultError, match=r"no answer within 0\.02 s"):
            read()
    peer.say(b"$300000\r\nthe beginning")
    assert connection.read_size() == 300000
    with pytest.raises(StoreFaultError, match=r"no answer within 0\.02 s"):
        connection.read_into(memoryview(bytearray(300000)))
    connection.close()


def test_whoever_takes_nothing_is_not_waited_for(peer: Peer) -> None:
    connection = peer.connect(timeout_s=0.02)
    with pytest.raises(StoreFaultError, match=r"no answer within 0\.02 s"):
        connection.send([LARGE] * 300)
    connection.close()


def test_whoever_hangs_up_is_said_to(peer: Peer) -> None:
    connection = peer.connect()
    peer.say(b"$10\r\nabc")
    peer.close()
    with pytest.raises(StoreFaultError, match="it has hung up"):
        connection.read_answer()
    connection.close()


def test_a_refused_connection_is_a_store_fault() -> None:
    with pytest.raises(StoreFaultError, match="refused"):
        RespConnection("127.0.0.1", 1, timeout_s=1.0)
