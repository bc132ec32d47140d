"""A server that is asked for much: the others are served meanwhile, and messages of one connection stay in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.protocol import CODEC, Call, Counts, Error, ErrorCode, Stats
from kvoffload.protocol.survey import BlocksFound, FindBlocks
from kvoffload.server import Guest, TcpSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.operators import survey
from kvoffload.types import AcquireOutcome
from tests.kit.server.blocks import MEMORY, acquire, connect, hashes_of, save
from tests.kit.server.remote_client import RemoteClient, make_keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    yield server
    server.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Searches wait for it."""
    gate = Event()
    original = survey.find_blocks

    def wait(*given: Any) -> Any:
        gate.wait()
        return original(*given)

    monkeypatch.setattr(survey, "find_blocks", wait)
    yield gate
    gate.set()


def test_others_are_served_meanwhile_and_the_order_is_kept(server: CacheServer, tmp_path: Path, gate: Event) -> None:
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    save(asks, hashes_of(3), 7)
    asks.send(FindBlocks(), 101)
    asks.send(Stats(), 102)
    for _ in range(3):
        assert isinstance(other.ask(Stats()), Counts)
    assert asks.receive_control() is None
    assert acquire(asks, hashes_of(3)).outcome is AcquireOutcome.HIT
    gate.set()
    found = asks.receive(101)
    assert isinstance(found, BlocksFound)
    assert found.total == 3
    assert isinstance(asks.receive(102), Counts)
    asks.close()
    other.close()


def test_a_fault_is_answered(server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = connect(server, tmp_path)

    def fail(*_: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(survey, "find_blocks", fail)
    answer = asks.ask(FindBlocks())
    assert isinstance(answer, Error)
    assert (answer.code, answer.about_op) == (ErrorCode.INTERNAL, FindBlocks.op)
    asks.close()


def test_what_comes_behind_a_long_call_stays_in_its_socket(server: CacheServer, tmp_path: Path, gate: Event) -> None:
    """The server holds none of it, however much that is, and serves all of it later, in its order."""
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    asks.send(FindBlocks(), 101)
    many = range(102, 302)
    for number in many:
        asks.send(Stats(), number)
    served = server.core.handle
    numbers = list[int]()

    def note(connection: bytes, call: Call, *given: Any, **named: Any) -> Any:
        numbers.append(call.number)
        return served(connection, call, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.core, "handle", note)
        for _ in range(3):
            assert isinstance(other.ask(Stats()), Counts)
        assert not set(numbers) & set(many)
        gate.set()
        assert isinstance(asks.receive(101), BlocksFound)
        assert isinstance(asks.receive(many[-1]), Counts)
    assert [number for number in numbers if number in many] == list(many)
    asks.close()
    other.close()


def test_an_engine_that_is_gone_meanwhile_harms_nobody(server: CacheServer, tmp_path: Path, gate: Event) -> None:
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    asks.send(FindBlocks(), 101)
    for _ in range(5):
        server.turn(0.005)
    asks.close()
    for _ in range(5):
        server.turn(0.005)
    gate.set()
    save(other, hashes_of(3, seed=4), 1)
    assert acquire(other, hashes_of(3, seed=4)).outcome is AcquireOutcome.HIT
    other.close()


def test_over_tcp_a_second_long_call_waits_for_nobody(tmp_path: Path) -> None:
    """An operator that asks twice at once is told to ask again, and the server goes on."""
    keys, own = make_keys(), make_keys()
    guests = {own.public.decode(): Guest(domain="", is_operator=True)}
    remote = TcpSettings(address=TcpAddress("127.0.0.1", 0), keys=keys, guests=guests)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, remote=remote))
    connect(server, tmp_path, engine="engine").close()
    client = RemoteClient(server.remote_endpoint, keys=own, server_key=keys.public, turn=lambda: server.turn(0.001))
    try:
        client.hello()
        for number in (101, 102):
            client.socket.send(CODEC.encode_call(FindBlocks(), number=number, session=0))
        first, second = client.receive(), client.receive()
        assert {type(first), type(second)} <= {BlocksFound, Error}
        assert BlocksFound in {type(first), type(second)}
        assert isinstance(client.ask(FindBlocks()), BlocksFound)
    finally:
        client.close()
        server.close()
