"""The control channel: bounded frames, a mode of its own, and readers that are never waited for."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvoffload.daemon.control import QUEUED_FRAMES, ControlSocket
from kvoffload.errors import ConfigError
from kvoffload.protocol.limits import FRAME_BYTES

TIMEOUT_S = 30.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    yield context
    context.term()


@pytest.fixture
def control(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> Iterator[ControlSocket]:
    control = ControlSocket(context, tmp_path / "c", mode=0o660, group=os.getgid())
    yield control
    control.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def client(context: zmq.Context[zmq.Socket[bytes]], control: ControlSocket) -> Iterator[zmq.Socket[bytes]]:
    client = context.socket(zmq.DEALER)
    client.connect(control.endpoint)
    yield client
    client.close(0)


def receive(control: ControlSocket) -> tuple[bytes, bytes]:
    end = time.monotonic() + TIMEOUT_S
    while True:
        received = control.receive()
        if received is not None:
            return received
        assert time.monotonic() < end
        control.socket.poll(10)


def test_frames_go_both_ways(control: ControlSocket, client: zmq.Socket[bytes], tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o660
    assert control.receive() is None
    client.send(b"asked")
    connection, frame = receive(control)
    assert frame == b"asked"
    assert control.send(connection, b"answered")
    assert client.poll(TIMEOUT_S * 1000)
    assert client.recv() == b"answered"


def test_a_message_of_several_parts_is_one_without_bytes(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    client.send_multipart([b"one", b"two"])
    assert receive(control)[1] == b""


def test_a_frame_that_is_too_long_never_arrives(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    client.send(b"x" * (FRAME_BYTES + 1))
    client.send(b"x" * FRAME_BYTES)
    assert len(receive(control)[1]) == FRAME_BYTES


def test_who_is_gone_and_who_does_not_read_is_told(control: ControlSocket, client: zmq.Socket[bytes]) -> None:
    assert not control.send(b"nobody", b"x")
    client.send(b"here")
    connection, _ = receive(control)
    sent = 0
    while control.send(connection, b"x" * 1024):
        sent += 1
        assert sent < 100 * QUEUED_FRAMES
    assert sent >= QUEUED_FRAMES


def test_a_path_that_cannot_be_used_is_refused(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 120), tmp_path / "none" / "c"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ControlSocket(context, path)
