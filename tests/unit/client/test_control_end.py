"""The client's end of the control channel, against ZeroMQ's own ROUTER and against a socket that says what it likes."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvoffload.client import control_end
from kvoffload.client.control_end import MAX_UNSENT_BYTES, ControlEnd
from kvoffload.errors import PacketError
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.zmtp import GREETING, ZmtpReader, pack_command, pack_head

WAIT_MS = 20_000
_READER = ZmtpReader(frame_bytes=1)
_READER.feed(memoryview(GREETING))
_READER.take()
READY = _READER.take_reply()
"""The answer of a server's end to a greeting."""


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/c"


@pytest.fixture
def router(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    yield router
    router.close(0)
    context.term()


@pytest.fixture
def listener(endpoint: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(endpoint.removeprefix("ipc://"))
        listener.listen(8)
        yield listener


def receive(end: ControlEnd) -> bytes:
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while (frame := end.receive()) is None:
        end.flush()
        assert poller.poll(WAIT_MS), "nothing came"
    return frame


@pytest.mark.parametrize("size", [0, 1, 255, 256, 300_000])
def test_a_router_of_zeromq_hears_every_message_and_answers(
    endpoint: str, router: zmq.Socket[bytes], size: int
) -> None:
    end = ControlEnd(endpoint)
    for number in range(3):
        assert end.send(bytes([number]) * size)
    for number in range(3):
        while not router.poll(10):
            assert end.receive() is None
            assert end.flush()
        client, frame = router.recv_multipart()
        assert frame == bytes([number]) * size
        router.send_multipart([client, b"answer" + frame])
        assert receive(end) == b"answer" + frame
    assert end.receive() is None
    end.close()


def test_without_a_server_there_is_no_end(endpoint: str) -> None:
    with pytest.raises(FileNotFoundError):
        ControlEnd(endpoint)


def test_a_backlog_that_is_full_is_not_waited_for(endpoint: str, listener: socket.socket) -> None:
    listener.listen(0)
    end = ControlEnd(endpoint)
    with pytest.raises(BlockingIOError):
        ControlEnd(endpoint)
    end.close()


def test_what_a_server_does_not_take_is_bounded(endpoint: str, listener: socket.socket) -> None:
    end = ControlEnd(endpoint)
    server = listener.accept()[0]
    frames = 0
    while end.send(bytes(65_536)):
        frames += 1
    assert frames == MAX_UNSENT_BYTES // 65_545  # the server has not greeted yet
    server.sendall(GREETING + READY)
    assert end.receive() is None
    assert end.flush()
    assert end.has_unsent
    assert not end.send(bytes(MAX_UNSENT_BYTES))
    end.close()
    server.close()


def test_a_message_that_comes_in_pieces_is_one(endpoint: str, listener: socket.socket) -> None:
    end = ControlEnd(endpoint)
    server = listener.accept()[0]
    for byte in GREETING + READY + pack_head(300) + b"x" * 300:
        assert end.receive() is None
        server.sendall(bytes([byte]))
    assert receive(end) == b"x" * 300
    end.close()
    server.close()


def test_a_ping_is_answered(endpoint: str, listener: socket.socket) -> None:
    end = ControlEnd(endpoint)
    server = listener.accept()[0]
    server.sendall(GREETING + READY + pack_command(b"\x04PING\x00\x0acontext"))
    assert end.receive() is None
    assert end.flush()
    assert server.recv(4096).endswith(pack_command(b"\x04PONGcontext"))
    end.close()
    server.close()


def test_answers_to_a_server_that_does_not_read_are_bounded(
    endpoint: str, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_end, "MAX_UNSENT_BYTES", 4096)
    end = ControlEnd(endpoint)
    server = listener.accept()[0]
    server.sendall(GREETING + READY)
    with pytest.raises(PacketError, match="does not read"):
        ask_for_ever(end, server)
    end.close()
    server.close()


def ask_for_ever(end: ControlEnd, server: socket.socket) -> None:
    while True:
        server.sendall(pack_command(b"\x04PING\x00\x0a" + bytes(200)))
        assert end.receive() is None


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "the server has closed the channel"),
        (b"HTTP/1.1 400 Bad Request", "this is not ZMTP 3"),
        (GREETING + pack_head(1) + b"x", "a message came before READY"),
        (GREETING + READY + pack_head(FRAME_BYTES + 1), f"a frame has {FRAME_BYTES + 1} bytes"),
    ],
)
def test_a_server_that_ends_or_breaks_the_rules_ends_the_connection(
    endpoint: str, listener: socket.socket, data: bytes, fault: str
) -> None:
    end = ControlEnd(endpoint)
    server = listener.accept()[0]
    server.sendall(data)
    server.close()
    with pytest.raises(PacketError, match=fault):
        receive(end)
    end.close()


def test_nothing_can_be_sent_after_the_server_has_ended(endpoint: str, listener: socket.socket) -> None:
    end = ControlEnd(endpoint)
    assert end.flush()
    listener.accept()[0].close()
    assert end.send(b"x")  # it waits for a greeting
    with pytest.raises(PacketError, match="the channel has ended"):
        end.receive()
    end.close()
