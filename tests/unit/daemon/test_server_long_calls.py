"""A server whose engine asks for much: the others are served meanwhile, and its own messages stay in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvoffload.daemon import block_calls, long_calls
from kvoffload.daemon.block_desk import LONG_BLOCKS
from kvoffload.daemon.server import CacheServer, ServerPlan
from kvoffload.protocol import Acquire, Acquired, Counts, Error, ErrorCode, Outcome, Stats
from tests.unit.daemon.test_server import MEMORY, acquire, connect, hashes_of, save

BLOCKS = LONG_BLOCKS + 1


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
