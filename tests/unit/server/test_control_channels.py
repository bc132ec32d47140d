"""Both ways of the control channel at once: whose connection is whose, and what a fault leaves."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.protocol import (
    CODEC,
    Answer,
    Counts,
    Error,
    ErrorCode,
    HelloAccepted,
    Mark,
    NamespaceOpened,
    Stats,
    Welcome,
)
from kvoffload.server import Guest, TcpSettings
from kvoffload.server.channels.control import ControlSocket
from kvoffload.server.channels.foreign_files import ForeignFiles
from kvoffload.server.control_channels import TURN_NS, ChannelSettings, ControlChannels
from kvoffload.server.sessions.outbox import Sendable, ToConnection
from kvoffload.zmtp import pack_head
from tests.kit.server.gate_loop import Loop
from tests.kit.server.guests import HELLO
from tests.kit.server.harness import Client, Server
from tests.kit.server.hostile_user import HELLO_GREETING
from tests.kit.server.remote_client import RemoteClient, make_keys

BOOT_ID = 5
KEYS, CLIENT = make_keys(), make_keys()
REMOTE = TcpSettings(
    address=TcpAddress("127.0.0.1", 0), keys=KEYS, guests={CLIENT.public.decode(): Guest(domain="main")}
)


class Both:
    """The channels of a core, with the loop played by the test."""

    def __init__(self, server: Server, tmp_path: Path, *, tells_users: bool = False) -> None:
        self.server = server
        self.loop = Loop()
        self.files = ForeignFiles()
        self.last = b""
        """The connection that was answered last."""
        settings = ChannelSettings(socket=tmp_path / "s", boot_id=BOOT_ID, remote=REMOTE, tells_users=tells_users)
        self.channels = ControlChannels(settings, self.loop, self.files)

    def turn(self) -> None:
        for file, flags in self.loop.poll.poll(1):
            self.channels.on_ready(file, reads=bool(flags & ~zmq.POLLOUT), writes=bool(flags & zmq.POLLOUT))
        self.channels.serve(self.channels.local_file, self.server.core, self.send, lambda: 1)
        for one in self.channels.sockets:
            if one.poll(0):
                self.channels.serve(one, self.server.core, self.send, lambda: 1)

    def send(self, messages: list[Sendable]) -> None:
        for one in messages:
            assert isinstance(one, ToConnection)
            self.last = one.connection
            self.channels.send(one.connection, one.message, one.number)


@pytest.fixture
def both(server: Server, tmp_path: Path) -> Iterator[Both]:
    made = Both(server, tmp_path)
    yield made
    made.channels.close()
    made.files.close()
    assert list(tmp_path.iterdir()) == []
    assert made.loop.watched == {}


@pytest.fixture
def local() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def ask(both: Both, local: zmq.Socket[bytes], message: object, session: int) -> object:
    local.send(CODEC.encode_call(message, number=1, session=session))  # type: ignore[arg-type]
    for _ in range(10_000):
        both.turn()
        if local.poll(0):
            answer = CODEC.decode_answer(local.recv())
            assert isinstance(answer, Answer)
            assert answer.boot_id == BOOT_ID
            return answer.message
    raise AssertionError("there is no answer")


def greet(server: Server, uid: int) -> Client:
    process = server.process(f"engine of {uid}", uid=uid)
    assert isinstance(process.greet(), Welcome)
    return process


def test_the_same_name_here_and_over_tcp_is_two_clients(both: Both, local: zmq.Socket[bytes]) -> None:
    engine = greet(both.server, 1)
    remote = RemoteClient(both.channels.remote_endpoint, keys=CLIENT, server_key=KEYS.public, turn=both.turn)
    remote.socket.disconnect(both.channels.remote_endpoint)
    for one in (local, remote.socket):
        one.setsockopt(zmq.ROUTING_ID, b"name")
    local.connect(both.channels.endpoint)
    remote.socket.connect(both.channels.remote_endpoint)
    try:
        assert isinstance(ask(both, local, HELLO, engine.session), HelloAccepted)
        refused = remote.ask(Stats())
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.NO_SESSION
        remote.hello()
        assert isinstance(remote.ask(Stats()), Counts)
        assert isinstance(ask(both, local, Stats(), engine.session), Counts)
    finally:
        remote.close()


@pytest.mark.parametrize("is_own", [True, False])
def test_where_users_are_told_apart_the_kernel_says_who_asks(
    server: Server, tmp_path: Path, local: zmq.Socket[bytes], is_own: bool
) -> None:
    both = Both(server, tmp_path, tells_users=True)
    try:
        local.connect(both.channels.endpoint)
        engine = greet(server, os.getuid() if is_own else os.getuid() + 1)
        answer = ask(both, local, HELLO, engine.session)
        assert isinstance(answer, HelloAccepted) is is_own
    finally:
        both.channels.close()
        both.files.close()


def test_frames_have_their_time_however_long_newcomers_took(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = greet(both.server, 1)
    now_ns, look = 0, ControlSocket.look
    handled: list[Sendable] = []
    served: list[int] = []

    def look_slowly(local: ControlSocket) -> None:
        nonlocal now_ns
        look(local)
        now_ns += 10 * TURN_NS

    monkeypatch.setattr(ControlSocket, "look", look_slowly)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(tmp_path / "s.control"))
        said = HELLO_GREETING
        for number, message in enumerate((HELLO, Mark(), Mark(), Mark()), 1):
            frame = CODEC.encode_call(message, number=number, session=engine.session)
            said += pack_head(len(frame)) + frame
        client.sendall(said)
        while len(handled) < 4:
            before = len(handled)
            both.channels.serve(both.channels.local_file, both.server.core, handled.extend, lambda: now_ns)
            served.append(len(handled) - before)
    assert max(served) > 1


def test_an_answer_that_does_not_fit_is_a_fault_of_ours(
    both: Both, local: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    local.connect(both.channels.endpoint)
    wrong = NamespaceOpened(name_space=-1, fingerprint=b"")
    ask(both, local, Stats(), 1)
    assert both.channels.send(both.last, wrong, 7)
    assert local.poll(30_000)
    answer = CODEC.decode_answer(local.recv())
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Error)
    assert (answer.message.code, answer.number) == (ErrorCode.INTERNAL, 7)
    assert "does not fit" in caplog.text


def test_a_send_to_a_missing_connection_fails(both: Both) -> None:
    gone = partial(both.channels.send, message=HelloAccepted(protocol=1, capabilities=(), domain=""), number=1)
    assert not gone(b"nobody")
    assert not gone(b"tcp".ljust(512, b"\0") + bytes(40) + b"nobody")


def test_what_cannot_be_had_leaves_nothing_behind(both: Both, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "s.tcp").mkdir()
    for folder in ("none", "other"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ControlChannels(
                ChannelSettings(socket=tmp_path / folder / "s", boot_id=1, remote=REMOTE), both.loop, both.files
            )
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["s.tcp"]
    (tmp_path / "other" / "s.tcp").rmdir()
    (tmp_path / "other").rmdir()
    assert len(both.loop.watched) == 2
