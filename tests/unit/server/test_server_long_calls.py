"""A server that is asked for much: the others are served meanwhile, and messages of one connection stay in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.protocol import CODEC, Counts, Error, ErrorCode, Outcome, Stats
from kvoffload.protocol.survey import BlocksFound, FindBlocks
from kvoffload.server import Guest, RemoteTerms, long_calls
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.operators import survey
from tests.kit.server.blocks import MEMORY, acquire, connect, hashes_of, save
from tests.kit.server.remote_client import RemoteClient


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
    assert acquire(asks, hashes_of(3)).outcome is Outcome.HIT
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


def test_more_than_may_wait_is_refused(
    server: CacheServer, tmp_path: Path, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_calls, "MAX_WAITING", 1)
    asks = connect(server, tmp_path)
    asks.send(FindBlocks(), 101)
    asks.send(Stats(), 102)
    asks.send(Stats(), 103)
    refused = asks.receive(103)
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.BUSY
    gate.set()
    assert isinstance(asks.receive(101), BlocksFound)
    assert isinstance(asks.receive(102), Counts)
    asks.close()


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
    assert acquire(other, hashes_of(3, seed=4)).outcome is Outcome.HIT
    other.close()


def test_over_tcp_a_second_long_call_waits_for_nobody(tmp_path: Path) -> None:
    """An operator that asks twice at once is told to ask again, and the server goes on."""
    stranger = Guest(domain="", is_operator=True)
    remote = RemoteTerms(address=TcpAddress("127.0.0.1", 0), stranger=stranger)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, remote=remote))
    connect(server, tmp_path, engine="engine").close()
    client = RemoteClient(server.remote_endpoint, turn=lambda: server.turn(0.001))
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
