"""The express channel as a socket: frames behind their lengths, what waits to be sent, and its ends."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.client.wire import SocketWire
from kvoffload.protocol import (
    CODEC,
    Acquire,
    Acquired,
    Answer,
    Call,
    Channel,
    ClientMessage,
    Done,
    Mark,
    Release,
    ServerMessage,
)
from kvoffload.types import AcquireOutcome
from tests.kit.open_files import count_open_files

BOOT_ID = 5
NOW_NS = 1_000
LATER_BYTES = 4096
"""Bytes of messages that need not go out at once."""


class Hearer:
    """A link, as far as a wire sees it."""

    def __init__(self) -> None:
        self.lanes = SimpleNamespace(awaits_control=False)
        self.heard: list[ServerMessage] = []
        self.faults: list[str] = []
        self.on_answer: Callable[[], None] = lambda: None

    def on_express(self, answer: Answer, now_ns: int) -> None:
        assert (answer.boot_id, now_ns) == (BOOT_ID, NOW_NS)
        self.heard.append(answer.message)
        self.on_answer()

    def hang_up(self, now_ns: int, line: str) -> None:
        assert now_ns == NOW_NS
        self.faults.append(line)


class Peer:
    """The server's end."""

    def __init__(self, wire: SocketWire, *, send_bytes: int = 0) -> None:
        self.end, theirs = socket.socketpair()
        if send_bytes:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self.end.setblocking(False)
        wire.open_express(theirs.detach())
        self._read = b""

    def receive(self) -> list[Call]:
        """Whole frames that are there."""
        try:
            while data := self.end.recv(1 << 20):
                self._read += data
        except BlockingIOError:
            pass
        calls = []
        while len(self._read) >= 4:
            size = int.from_bytes(self._read[:4], "little")
            if len(self._read) < 4 + size:
                break
            call = CODEC.decode_call(self._read[4 : 4 + size], channel=Channel.EXPRESS)
            assert isinstance(call, Call)
            calls.append(call)
            self._read = self._read[4 + size :]
        return calls

    def answer(self, message: ServerMessage, number: int = 1) -> None:
        self.end.sendall(framed(message, number))

    def is_ended(self) -> bool:
        try:
            return self.end.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # something was not read


@pytest.fixture
def wire() -> Iterator[SocketWire]:
    before = count_open_files()
    wire = SocketWire(None)
    opened = count_open_files()
    yield wire
    wire.hang_up()
    assert wire.express_file == -1
    assert count_open_files() == opened
    wire.hang_up()
    assert count_open_files() == before


@pytest.fixture
def peer(wire: SocketWire) -> Iterator[Peer]:
    peer = Peer(wire)
    yield peer
    peer.end.close()


@pytest.fixture
def link() -> Any:
    return Hearer()


def framed(message: ServerMessage, number: int = 1) -> bytes:
    frame = CODEC.encode_answer(message, number=number, boot_id=BOOT_ID, channel=Channel.EXPRESS)
    return len(frame).to_bytes(4, "little") + frame


def send(wire: SocketWire, message: ClientMessage, number: int = 1) -> bool:
    return wire.send_express(Call(message, number, 9, 77))


def lease(number: int) -> Release:
    return Release(leases=number.to_bytes(8, "little"))


def test_there_is_none_at_first(wire: SocketWire, link: Any) -> None:
    assert (wire.express_file, wire.has_unsent, send(wire, Mark())) == (-1, False, False)
    assert wire.receive_answers(link, NOW_NS)
    wire.receive_all(link, NOW_NS)
    wire.await_answers(0)
    assert (link.heard, link.faults) == ([], [])


def test_a_frame_is_behind_its_length(wire: SocketWire, peer: Peer) -> None:
    assert send(wire, Mark(), 3)
    frame = CODEC.encode_call(Mark(), number=3, session=9, expires_ns=77)
    assert peer.end.recv(1000) == len(frame).to_bytes(4, "little") + frame
    assert not wire.has_unsent


def test_answers_come_whole_and_in_order(wire: SocketWire, peer: Peer, link: Any) -> None:
    hit = Acquired(outcome=AcquireOutcome.HIT, boundary=16, lease=7)
    data = framed(hit, 1) + framed(Done(), 2)
    cut = len(framed(hit)) + 2
    peer.end.sendall(data[:cut])
    wire.await_answers(30)
    assert wire.receive_answers(link, NOW_NS)
    assert link.heard == [hit]
    peer.end.sendall(data[cut:])
    wire.receive_all(link, NOW_NS)
    assert link.heard == [hit, Done()]
    assert link.faults == []


def test_what_is_larger_than_a_socket_comes_too(wire: SocketWire, peer: Peer, link: Any) -> None:
    large = Acquired(outcome=AcquireOutcome.HIT, boundary=1, lease=1, groups=())
    data = framed(large) * 20_000
    while data:
        try:
            data = data[peer.end.send(data) :]
        except BlockingIOError:
            assert wire.receive_answers(link, NOW_NS)
    assert wire.receive_answers(link, NOW_NS)
    assert link.heard == [large] * 20_000


def test_a_release_goes_with_the_next_message(wire: SocketWire, peer: Peer) -> None:
    """The server need not wake up for it alone."""
    assert send(wire, lease(1), 1)
    assert send(wire, lease(2), 2)
    assert not wire.has_unsent  # no caller waits for these to be sent
    assert peer.receive() == []
    assert send(wire, Mark(), 1)
    assert [call.message for call in peer.receive()] == [lease(1), lease(2), Mark()]


def test_a_release_is_sent_when_the_connection_is_looked_at(wire: SocketWire, peer: Peer, link: Any) -> None:
    assert send(wire, lease(1))
    wire.receive_answers(link, NOW_NS)
    assert peer.receive() == []
    wire.receive_all(link, NOW_NS)
    assert [call.message for call in peer.receive()] == [lease(1)]


def test_many_releases_do_not_wait(wire: SocketWire, peer: Peer) -> None:
    frame_bytes = 4 + len(CODEC.encode_call(lease(1), number=1, session=9, expires_ns=77, channel=Channel.EXPRESS))
    for number in range(2 * LATER_BYTES // frame_bytes):
        assert send(wire, lease(number + 1), 1)
    assert len(peer.receive()) >= LATER_BYTES // frame_bytes


def test_what_does_not_fit_a_socket_waits_and_says_so(wire: SocketWire, link: Any) -> None:
    told: list[bool] = []
    wire.on_unsent = lambda: told.append(wire.has_unsent)
    peer = Peer(wire, send_bytes=4096)
    large = Acquire(name_space=1, chain=bytes(32 * 8000))
    assert send(wire, large, 1)
    assert send(wire, Mark(), 2)
    assert told == [True, True]
    calls: list[Call] = []
    while len(calls) < 2:
        calls += peer.receive()
        # The caller that is woken polls for this, and receives.
        poller = select.poll()
        poller.register(wire.express_file, select.POLLOUT)
        assert poller.poll(30_000)
        wire.receive_all(link, NOW_NS)
    assert [call.message for call in calls] == [large, Mark()]
    assert (wire.has_unsent, told) == (False, [True, True])
    assert send(wire, Mark(), 3)
    assert told == [True, True]
    peer.end.close()


def test_who_reads_nothing_is_sent_so_much_and_no_more(wire: SocketWire) -> None:
    peer = Peer(wire)
    large = Acquire(name_space=1, chain=bytes(32 * 32_000))
    sent = 0
    while sent < 1000 and send(wire, large):
        sent += 1
    assert 32 <= sent < 1000
    peer.end.close()


def test_the_end_of_the_stream_is_seen_behind_what_came(wire: SocketWire, peer: Peer, link: Any) -> None:
    peer.answer(Done())
    peer.end.close()
    wire.await_answers(30)
    assert wire.receive_answers(link, NOW_NS)
    assert link.heard == [Done()]
    wire.await_answers(30)
    assert not wire.receive_answers(link, NOW_NS)
    assert (link.heard, link.faults) == ([Done()], [])
    assert not send(wire, Mark())
    wire.receive_all(link, NOW_NS)
    assert link.faults == ["the server has closed the express channel"]


@pytest.mark.parametrize("frame", [b"\xc1", b"\x93\x01\x02\x03"])
def test_nonsense_ends_the_connection(wire: SocketWire, peer: Peer, link: Any, frame: bytes) -> None:
    peer.end.sendall(len(frame).to_bytes(4, "little") + frame)
    wire.receive_answers(link, NOW_NS)
    (fault,) = link.faults
    assert fault.startswith("express: ")


def test_a_length_that_no_frame_has_ends_it(wire: SocketWire, peer: Peer, link: Any) -> None:
    peer.end.sendall(b"\xff\xff\xff\xff")
    assert not wire.receive_answers(link, NOW_NS)


def test_a_second_one_ends_the_first(wire: SocketWire, peer: Peer, link: Any) -> None:
    peer.answer(Done())
    first = os.dup(wire.express_file)  # as a thread that waits at it has it
    second = Peer(wire)
    assert peer.is_ended()
    os.close(first)
    assert send(wire, Mark())
    assert [call.message for call in second.receive()] == [Mark()]
    assert wire.receive_answers(link, NOW_NS)
    assert (link.heard, link.faults) == ([], [])
    second.end.close()


def test_a_hang_up_shuts_it(wire: SocketWire, peer: Peer) -> None:
    wire.hang_up()
    assert peer.is_ended()
    assert (wire.express_file, wire.has_unsent, send(wire, Mark())) == (-1, False, False)


def test_what_ends_it_is_the_last_that_is_heard(wire: SocketWire, peer: Peer, link: Any) -> None:
    """Of a connection that was given up nothing is said any more, nor that it has ended."""
    link.on_answer = wire.hang_up
    for number in (1, 2):
        peer.answer(Done(), number)
    assert wire.receive_answers(link, NOW_NS)
    assert link.heard == [Done()]
    wire.receive_all(link, NOW_NS)
    assert link.faults == []


def test_the_last_word_of_an_ended_one_is_enough(wire: SocketWire, peer: Peer, link: Any) -> None:
    link.on_answer = wire.hang_up
    peer.answer(Done())
    peer.end.close()
    wire.receive_all(link, NOW_NS)
    assert (link.heard, link.faults) == ([Done()], [])


def test_control_is_left_to_others_unless_it_is_awaited(
    wire: SocketWire, peer: Peer, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(wire, "receive_control", lambda _, now_ns: looked.append(now_ns))
    wire.receive_answers(link, NOW_NS)
    assert looked == []
    link.lanes.awaits_control = True
    wire.receive_answers(link, NOW_NS)
    assert looked == [NOW_NS]
    link.lanes.awaits_control = False
    wire.receive_all(link, NOW_NS)
    assert looked == [NOW_NS] * 2
    wire.hang_up()
    wire.receive_answers(link, NOW_NS)
    assert looked == [NOW_NS] * 3
