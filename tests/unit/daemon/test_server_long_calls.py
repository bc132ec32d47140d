"""A server whose engine asks for much: the others are served meanwhile, and its own messages stay in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from kvoffload.daemon import Guest, RemoteTerms, block_calls, block_desk, long_calls
from kvoffload.daemon.block_desk import LONG_BLOCKS
from kvoffload.daemon.server import CacheServer, ServerPlan
from kvoffload.protocol import (
    CODEC,
    Acquire,
    Acquired,
    Counts,
    Credits,
    CreditsGranted,
    Error,
    ErrorCode,
    NamespaceOpened,
    Outcome,
    Publish,
    Stats,
    Stored,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.survey import BlocksFound, FindBlocks
from kvoffload.tcp_address import TcpAddress
from tests.unit.daemon.remote_client import RemoteClient
from tests.unit.daemon.test_server import MEMORY, acquire, connect, hashes_of, save

BLOCKS = LONG_BLOCKS + 1
TIMEOUT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    yield server
    server.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Acquires wait for it."""
    gate = Event()
    original = block_calls.acquire

    def wait(*given: Any) -> Any:
        gate.wait()
        return original(*given)

    monkeypatch.setattr(block_calls, "acquire", wait)
    yield gate
    gate.set()


def test_others_are_served_meanwhile_and_the_order_is_kept(server: CacheServer, tmp_path: Path, gate: Event) -> None:
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    hashes = hashes_of(BLOCKS)
    save(asks, hashes, 7)
    asks._send(Acquire(name_space=asks.name_space, chain=hashes), 101)
    asks._send(Stats(), 102)
    for _ in range(3):
        counts = other.ask(Stats())
        assert isinstance(counts, Counts)
        assert counts.leases == 0
    gate.set()
    hit = asks.receive(101)
    assert isinstance(hit, Acquired)
    assert (hit.outcome, len(hit.groups[0].addresses)) == (Outcome.HIT, 8 * BLOCKS)
    counts = asks.receive(102)
    assert isinstance(counts, Counts)
    assert counts.leases == 1
    asks.close()
    other.close()


def test_a_fault_is_answered(server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = connect(server, tmp_path)

    def fail(*_: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(block_calls, "acquire", fail)
    answer = asks.ask(Acquire(name_space=asks.name_space, chain=hashes_of(BLOCKS)))
    assert isinstance(answer, Error)
    assert (answer.code, answer.about_op) == (ErrorCode.INTERNAL, Acquire.op)
    asks.close()


def test_more_than_may_wait_is_refused(
    server: CacheServer, tmp_path: Path, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_calls, "MAX_WAITING", 1)
    asks = connect(server, tmp_path)
    asks._send(Acquire(name_space=asks.name_space, chain=hashes_of(BLOCKS)), 101)
    asks._send(Stats(), 102)
    asks._send(Stats(), 103)
    refused = asks.receive(103)
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.BUSY
    gate.set()
    assert isinstance(asks.receive(101), Acquired)
    assert isinstance(asks.receive(102), Counts)
    asks.close()


@pytest.fixture
def publish_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Publishes wait for it; all of them are large."""
    gate = Event()
    original = block_calls.publish

    def wait(*given: Any) -> Any:
        assert gate.wait(TIMEOUT_S), "the loop itself has made digests"
        return original(*given)

    monkeypatch.setattr(block_calls, "publish", wait)
    monkeypatch.setattr(block_desk, "LONG_BYTES", 0)
    yield gate
    gate.set()


def test_a_large_publish_without_digests_holds_up_nobody_else(
    server: CacheServer, tmp_path: Path, publish_gate: Event
) -> None:
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    hashes = hashes_of(5)
    assert isinstance(other.ask(Subscribe()), Subscribed)
    granted = asks.ask(Credits(name_space=asks.name_space, group=0, count=5))
    assert isinstance(granted, CreditsGranted)
    asks.tell(Publish(name_space=asks.name_space, group=0, shard=0, tickets=granted.tickets, hashes=hashes))
    asks._send(Acquire(name_space=asks.name_space, chain=hashes), 101)
    for _ in range(3):
        counts = other.ask(Stats())
        assert isinstance(counts, Counts)
        assert counts.readable == 0
    publish_gate.set()
    # What came behind it finds what was published.
    hit = asks.receive(101)
    assert isinstance(hit, Acquired)
    assert hit.outcome is Outcome.HIT
    assert isinstance(other.receive(1), NamespaceOpened)
    told = other.receive(2)
    assert isinstance(told, Stored)
    assert told.hashes == hashes
    asks.close()
    other.close()


def test_a_small_publish_with_digests_is_served_at_once(
    server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = connect(server, tmp_path)
    threads: list[Thread] = []
    original = block_calls.publish

    def note(*given: Any) -> Any:
        threads.append(current_thread())
        return original(*given)

    monkeypatch.setattr(block_calls, "publish", note)
    save(asks, hashes_of(5), 7)
    monkeypatch.setattr(block_desk, "LONG_BYTES", 0)
    asks.tell(Publish(name_space=0, group=0, shard=0, tickets=bytes(8), hashes=bytes(32), digests=b"x" * 8))
    assert isinstance(asks.ask(Stats()), Counts)
    assert threads == [current_thread()] * 2
    monkeypatch.setattr(block_desk, "LONG_BLOCKS", 4)
    save(asks, hashes_of(5, seed=9), 7)
    assert isinstance(asks.ask(Stats()), Counts)
    assert threads[2] is not current_thread()
    asks.close()


def test_a_large_publish_that_is_wrong_is_answered(
    server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(block_desk, "LONG_BYTES", 0)
    monkeypatch.setattr(block_calls, "publish", fail)
    asks = connect(server, tmp_path)
    asks.tell(Publish(name_space=0, group=0, shard=0, tickets=bytes(8), hashes=bytes(32)), number=1)
    answer = asks.receive(1)
    assert isinstance(answer, Error)
    assert (answer.code, answer.about_op) == (ErrorCode.INTERNAL, Publish.op)
    asks.close()


def test_an_engine_that_is_gone_meanwhile_harms_nobody(server: CacheServer, tmp_path: Path, gate: Event) -> None:
    asks, other = connect(server, tmp_path, engine="asks"), connect(server, tmp_path, engine="other")
    save(asks, hashes_of(BLOCKS), 7)
    asks._send(Acquire(name_space=asks.name_space, chain=hashes_of(BLOCKS)), 101)
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
