"""The wire as sockets: nothing waits, and nonsense ends the connection."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvoffload.client.link import Link
from kvoffload.client.settings import LinkState
from kvoffload.client.wire import SocketWire, explain_unreached
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
    wire.hang_up()


@pytest.fixture
def link(wire: SocketWire) -> Iterator[Link]:
    pidfd = os.pidfd_open(os.getpid())
    link = make_link(wire, pidfd=pidfd)  # type: ignore[arg-type]
    yield link
    link.close()
    os.close(pidfd)


def test_without_a_server_dialling_fails_with_a_reason(wire: SocketWire) -> None:
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
            wire.hang_up()


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
        while not router.poll(10):
            wire.receive_all(link, NOW_NS)
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


NOBODY = 65534


@contextmanager
def listening(path: Path, kind: int = socket.SOCK_SEQPACKET) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, kind) as end:
        end.bind(str(path))
        end.listen(0)
        yield


@contextmanager
def no_superuser() -> Iterator[int]:
    """Within it this process is of a user who may be refused something; gives whose."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        if uid == 0:
            os.seteuid(uid)


def dial(path: Path) -> str:
    wire = SocketWire(path)
    try:
        return wire.dial()
    finally:
        wire.hang_up()


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    assert dial(tmp_path / "s") == f"{tmp_path}/s is not there"
    assert dial(tmp_path / "folder" / "s") == f"{tmp_path}/folder/s is not there"


def test_what_was_refused_and_is_gone_by_now(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    assert explain_unreached(tmp_path / "s", refused) == f"{tmp_path}/s cannot be reached: Permission denied"


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    assert dial(tmp_path / "s") == f"{tmp_path}/s is no socket"


def test_a_socket_that_a_dead_server_left(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        assert dial(tmp_path / "s") == ""
    assert dial(tmp_path / "s") == f"{tmp_path}/s is a socket that a server has left: no process listens on it"


def test_a_socket_of_another_program(tmp_path: Path) -> None:
    with listening(tmp_path / "s", socket.SOCK_STREAM):
        assert "of another program" in dial(tmp_path / "s")


def test_a_server_that_takes_no_connection(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        wires = [SocketWire(tmp_path / "s") for _ in range(3)]
        told = [wire.dial() for wire in wires]
        assert "takes no connection" in told[-1]
        for wire in wires:
            wire.hang_up()


def test_a_socket_whose_mode_refuses_us_tells_both_ids(open_folder: Path) -> None:
    path = open_folder / "s"
    with listening(path):
        path.chmod(0)
        with no_superuser() as uid:
            told = dial(path)
    assert told.startswith(f"{path} may not be used by this process, which is of user {uid} and group")
    assert told.endswith(f": it has mode 0000, user {os.geteuid()} and group {os.getegid()}")


def test_a_folder_that_nobody_may_enter_is_named(open_folder: Path) -> None:
    folder = open_folder / "closed"
    folder.mkdir()
    with listening(folder / "s"):
        folder.chmod(0)
        with no_superuser():
            told = dial(folder / "s")
        folder.chmod(0o700)
    assert f": {folder} has mode 0000, " in told


def test_what_is_not_known_by_name_is_told_in_the_systems_words(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        assert explain_unreached(tmp_path / "s", OSError(5, "Input/output error")).endswith(": Input/output error")


def test_a_path_that_is_too_long_is_told_too(tmp_path: Path) -> None:
    assert "too long" in dial(tmp_path / ("x" * 200))
