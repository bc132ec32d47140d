"""The gate for TCP connections: bytes pass unchanged, bounds hold, and the gate waits for no client."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload import native
from kvoffload.config.tcp_address import TcpAddress, parse_tcp_address
from kvoffload.errors import ConfigError
from kvoffload.server.channels import tcp_gate
from kvoffload.server.channels.curve_handshake import GREETING_BYTES
from kvoffload.server.channels.tcp_gate import (
    CHUNK_BYTES,
    MAX_CONNECTIONS,
    MAX_OF_ONE_HOST,
    MAX_UNPROVEN,
    TcpGate,
)
from tests.kit.open_files import count_open_files
from tests.kit.server.gate_loop import Loop

TIMEOUT_S = 30.0
LOOPBACK = TcpAddress("127.0.0.1", 0)
ACCEPTED = bytes(GREETING_BYTES) + b"\x04\x06\x05READY"


class Gate:
    """A gate with both its sides: clients, and the Unix socket behind it."""

    def __init__(self, tmp_path: Path) -> None:
        self.loop = Loop()
        self.behind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.behind.bind(str(tmp_path / "inner"))
        self.behind.listen(MAX_CONNECTIONS)
        self.gate = TcpGate(LOOPBACK, tmp_path / "inner", self.loop, clock_s=lambda: 0.0)
        self.opened: list[socket.socket] = [self.behind]

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.gate.address.port), TIMEOUT_S, source_address=(host, 0))
        made.setblocking(False)
        self.opened.append(made)
        return made

    def accept(self) -> socket.socket:
        found: list[socket.socket] = []

        def is_there() -> bool:
            try:
                found.append(self.behind.accept()[0])
            except BlockingIOError:
                return False
            return True

        self.wait(is_there)
        found[0].setblocking(False)
        self.opened.append(found[0])
        return found[0]

    def wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end
            self.loop.turn(self.gate)

    def receive(self, source: socket.socket, count: int) -> bytes:
        found = bytearray()

        def is_done() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.extend(source.recv(1 << 20))
            return len(found) >= count

        self.wait(is_done)
        return bytes(found)

    def is_closed(self, end: socket.socket) -> bool:
        try:
            return end.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    before = count_open_files()
    made = Gate(tmp_path)
    yield made
    made.gate.close()
    for opened in made.opened:
        opened.close()
    assert made.loop.watched == {}
    assert count_open_files() == before


def test_bytes_go_both_ways_as_they_are(gate: Gate) -> None:
    client = gate.connect()
    server = gate.accept()
    sent = os.urandom(8 * CHUNK_BYTES)
    for source, target in ((client, server), (server, client)):
        left = memoryview(sent)
        found = b""
        while len(found) < len(sent):
            with contextlib.suppress(BlockingIOError):
                left = left[source.send(left) :] if left else left
            found += gate.receive(target, 1)
        assert found == sent


@pytest.mark.parametrize("is_client", [True, False])
def test_the_end_of_one_side_is_that_of_the_other(gate: Gate, is_client: bool) -> None:
    client = gate.connect()
    server = gate.accept()
    ended, other = (client, server) if is_client else (server, client)
    ended.close()
    gate.wait(lambda: gate.is_closed(other))
    assert len(gate.gate) == 0


def test_who_does_not_read_is_not_read_from(gate: Gate) -> None:
    """And the gate does not turn in vain meanwhile."""
    client = gate.connect()
    server = gate.accept()
    idle = sent = 0
    while idle < 20:
        with contextlib.suppress(BlockingIOError):
            sent += client.send(bytes(CHUNK_BYTES))
        idle = 0 if gate.loop.turn(gate.gate) else idle + 1
    assert 0 < gate.gate.pending_bytes <= CHUNK_BYTES
    assert len(gate.receive(server, sent)) == sent


def test_a_side_that_breaks_while_it_is_not_read_ends(gate: Gate) -> None:
    client = gate.connect()
    gate.accept()
    idle = 0
    while idle < 20:
        with contextlib.suppress(BlockingIOError):
            client.send(bytes(CHUNK_BYTES))
        idle = 0 if gate.loop.turn(gate.gate) else idle + 1
    gate.opened.pop().close()  # what is behind the gate
    gate.wait(lambda: len(gate.gate) == 0)


def prove(gate: Gate, client: socket.socket, server: socket.socket) -> None:
    """The server says what it says to a client whose key it accepts."""
    server.send(ACCEPTED)
    gate.receive(client, len(ACCEPTED))


def test_of_clients_with_a_key_one_host_has_a_bound_and_all_have_one(gate: Gate) -> None:
    hosts = MAX_CONNECTIONS // MAX_OF_ONE_HOST
    for host in range(hosts):
        for _ in range(MAX_OF_ONE_HOST):
            prove(gate, gate.connect(f"127.0.0.{host + 1}"), gate.accept())
        beyond, server = gate.connect(f"127.0.0.{host + 1}"), gate.accept()
        server.send(ACCEPTED)
        gate.wait(lambda beyond=beyond: gate.is_closed(beyond))  # type: ignore[misc]
    assert (len(gate.gate), gate.gate.unproven) == (MAX_CONNECTIONS, 0)
    another, server = gate.connect("127.0.0.99"), gate.accept()
    server.send(ACCEPTED)
    gate.wait(lambda: gate.is_closed(another))
    gate.opened[1].close()
    gate.wait(lambda: len(gate.gate) == MAX_CONNECTIONS - 1)
    prove(gate, gate.connect("127.0.0.99"), gate.accept())
    assert len(gate.gate) == MAX_CONNECTIONS


def test_without_a_key_the_oldest_of_whoever_has_most_gives_way(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_gate, "name_peer", lambda connected: connected.getpeername()[0])
    proven = gate.connect("127.0.0.1")
    prove(gate, proven, gate.accept())
    single = gate.connect("127.0.0.2")
    gate.accept()
    many = []
    for _ in range(2 * MAX_UNPROVEN):
        many.append(gate.connect("127.0.0.3"))
        gate.accept()
    assert gate.gate.unproven == MAX_UNPROVEN
    assert [gate.is_closed(one) for one in many] == [at <= MAX_UNPROVEN for at in range(2 * MAX_UNPROVEN)]
    assert not gate.is_closed(single)
    assert not gate.is_closed(proven)


def test_thousands_that_come_and_go_leave_nothing(gate: Gate) -> None:
    for at in range(2000):
        client = gate.connect(f"127.0.{at % 200}.1")
        server = gate.accept()
        client.send(b"junk")
        (client if at % 2 else server).close()
        gate.wait(lambda: len(gate.gate) == 0)
        (server if at % 2 else client).close()
        del gate.opened[1:]
    assert gate.gate.hosts == 0
    assert len(gate.loop.watched) == 1


def test_without_a_server_behind_it_connections_end(gate: Gate) -> None:
    gate.behind.close()
    client = gate.connect()
    gate.wait(lambda: gate.is_closed(client))
    assert len(gate.gate) == 0


def test_without_descriptors_it_waits_for_some(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "accept_open", lambda _: -errno.EMFILE)
    gate.connect()
    gate.wait(lambda: gate.loop.watched == {})
    assert gate.loop.turn(gate.gate) == 0
    monkeypatch.undo()
    gate.gate.tick()
    gate.accept()


def test_an_address_that_is_not_to_be_had_is_one_line(gate: Gate, tmp_path: Path) -> None:
    taken = gate.gate.address
    with pytest.raises(ConfigError, match=f"cannot listen at {taken}: Address already in use; choose another"):
        TcpGate(taken, tmp_path / "inner", Loop())
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        TcpGate(parse_tcp_address("tcp://203.0.113.1:0"), tmp_path / "inner", Loop())


def test_version_6_is_version_6_alone(tmp_path: Path) -> None:
    try:
        gate = TcpGate(TcpAddress("::1", 0), tmp_path / "inner", Loop())
    except ConfigError:
        pytest.skip("there is no IPv6 here")
    assert str(gate.address) == f"tcp://[::1]:{gate.address.port}"
    gate.close()
    with pytest.raises(ConfigError, match="Invalid argument"):
        TcpGate(TcpAddress("::ffff:127.0.0.1", 0), tmp_path / "inner", Loop())


def test_a_connection_for_which_zeromq_may_find_no_descriptor_is_closed(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ ends the process if it cannot accept. Connections that it has not accepted yet count, too."""
    first = gate.connect()
    accepted = gate.accept()
    accepted.sendall(ACCEPTED)
    assert gate.receive(first, len(ACCEPTED)) == ACCEPTED
    most = os.dup(gate.behind.fileno())
    os.close(most)
    # The clients of both take two descriptors, each connection at the gate two more, and each of ZeroMQ one.
    monkeypatch.setattr(tcp_gate, "is_of_reserve", lambda file: file > most + 6)
    second, third = gate.connect(), gate.connect()
    gate.wait(lambda: gate.is_closed(third))
    assert not gate.is_closed(second)


def test_many_connections_at_once_wait_and_none_has_to_try_again(gate: Gate) -> None:
    """The kernel ends the handshake of a connection for which there is room at once, before the loop has a turn."""
    poller = select.poll()
    for _ in range(4 * MAX_UNPROVEN - 1):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        gate.opened.append(made)
        made.connect_ex(("127.0.0.1", gate.gate.address.port))
        poller.register(made, select.POLLOUT)
    assert [flags for _, flags in poller.poll(0)] == [select.POLLOUT] * (4 * MAX_UNPROVEN - 1)


def test_a_few_are_accepted_before_others_have_their_turn(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_gate, "ACCEPTS_AT_ONCE", 2)
    for _ in range(5):
        gate.connect()
    gate.loop.turn(gate.gate)
    assert len(gate.gate) == 2


def test_a_few_are_served_in_a_turn_and_then_the_others(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_gate, "READY_AT_ONCE", 2)
    for _ in range(3):
        gate.connect()
        gate.accept()
    listener, *ends = gate.loop.watched
    served: list[int] = []
    for _ in range(3):
        first, *chosen = gate.gate.choose([listener, *ends])
        assert (first, len(chosen)) == (listener, 2)
        for file in chosen:
            gate.gate.on_ready(file, reads=True, writes=False)
        served += chosen
    assert sorted(served) == sorted(ends)


def test_connections_that_have_been_closed_meanwhile_cost_nothing_behind_it(gate: Gate) -> None:
    """A host that opens and closes connections all the time keeps no other waiting: ZeroMQ does not see them."""
    for _ in range(tcp_gate.ACCEPTS_AT_ONCE - 1):
        gate.connect().close()
    client = gate.connect()
    client.send(b"greeting")
    server = gate.accept()
    assert len(gate.gate) == 1
    assert gate.receive(server, 8) == b"greeting"
    with pytest.raises(BlockingIOError):
        gate.behind.accept()
