"""The wire as sockets: nothing waits, and nonsense ends the connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvoffload.client.link import Link
from kvoffload.client.terms import LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.packets import PacketSocket
from kvoffload.protocol import CODEC, Call, Channel, Farewell, Stats, Welcome
from tests.kit.client.fake_wire import make_link

NOW_NS = 1_000_000_000
GREETING_NUMBER = 1


class Listener:
    """The server's end, as far as a test wants one."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(1)
        self.ends: list[PacketSocket] = []

    def accept(self) -> PacketSocket:
        self.ends.append(PacketSocket(self._socket.accept()[0]))
        return self.ends[-1]

    def close(self) -> None:
        self._socket.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = Listener(path)
    yield listener
    listener.close()


@pytest.fixture
def wire(path: Path) -> Iterator[SocketWire]:
    wire = SocketWire(path)
    yield wire
    wire.close()


@pytest.fixture
def link(wire: SocketWire) -> Iterator[Link]:
    link = make_link(wire)  # type: ignore[arg-type]
    link._pidfd = os.pidfd_open(os.getpid())
    yield link
    link.close()
    os.close(link._pidfd)


def test_nobody_listens(wire: SocketWire) -> None:
    assert wire.dial().endswith(" is not there")
    assert (wire.lifeline_file, wire.control_file) == (-1, -1)
    assert not wire.send_control(Call(Stats(), 1, 1, 0))


def test_a_greeting_arrives_with_the_pidfd(wire: SocketWire, link: Link, listener: Listener) -> None:
    link.on_time(NOW_NS)
    packet = listener.accept().receive()
    assert packet is not None
    call = CODEC.decode_call(packet.data, channel=Channel.LIFELINE)
    assert isinstance(call, Call)
    assert (call.number, len(packet.descriptors)) == (GREETING_NUMBER, 1)
    packet.close()


def test_a_backlog_that_is_full_is_not_waited_for(
    path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prompt(socket.socket):
        def connect(self, address: object) -> None:
            assert self.gettimeout() == 0
            super().connect(address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Prompt)
    wires = [SocketWire(path) for _ in range(4)]
    try:
        assert any(wire.dial() for wire in wires)
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("data", [b"\xc1", b"\x93\x01\x02\x03"])
def test_nonsense_on_the_lifeline_ends_it(wire: SocketWire, link: Link, listener: Listener, data: bytes) -> None:
    link.on_time(NOW_NS)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert listener.accept().send(data, [descriptor])
    os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    wire.receive_all(link, NOW_NS)
    assert link.state is LinkState.DOWN
    assert link.fault.startswith("lifeline: ")
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the lifeline; what came with it is closed too


def test_the_end_of_the_lifeline_is_seen(wire: SocketWire, link: Link, listener: Listener) -> None:
    link.on_time(NOW_NS)
    listener.accept().close()
    wire.receive_all(link, NOW_NS)
    assert link.state is LinkState.DOWN
    assert link.fault.startswith("the other end ")


def test_what_does_not_fit_the_lifeline_at_once_follows(wire: SocketWire, link: Link, listener: Listener) -> None:
    link.on_time(NOW_NS)
    end = listener.accept()
    call = Call(Farewell(), 1, 0, 0)
    sent = 0
    while not wire.wants_to_write:
        assert wire.send_lifeline(call, ())
        sent += 1
    for _ in range(3):
        assert wire.send_lifeline(call, ())
    received = 0
    while received < 1 + sent + 3:
        received += end.receive() is not None
        wire.receive_lifeline(link, NOW_NS)
    assert not wire.wants_to_write


def test_nonsense_on_the_control_channel_ends_the_connection(
    wire: SocketWire, link: Link, listener: Listener, path: Path
) -> None:
    endpoint = f"ipc://{path}.control"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    try:
        link.on_time(NOW_NS)
        end = listener.accept()
        welcome = Welcome(protocol=1, session=5, domain="", control=endpoint)
        assert end.send(CODEC.encode_answer(welcome, number=1, boot_id=1, channel=Channel.LIFELINE))
        wire.receive_all(link, NOW_NS)
        assert router.poll(10_000)
        connection, _hello = router.recv_multipart()
        router.send_multipart([connection, b"\xc1"])
        for _ in range(1000):
            wire.await_answers(0.01)
            wire.receive_answers(link, NOW_NS)
            if link.state is LinkState.DOWN:
                break
        assert link.fault.startswith("control: frame")
        assert (wire.lifeline_file, wire.control_file) == (-1, -1)
    finally:
        router.close(0)
        context.term()
