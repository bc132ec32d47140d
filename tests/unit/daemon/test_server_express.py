"""A server and its express channels: who gets one, what of it others see, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.daemon import express_channels
from kvoffload.daemon.server import CacheServer, ServerPlan
from kvoffload.protocol import (
    CODEC,
    Abort,
    Acquire,
    Acquired,
    Channel,
    Counts,
    Credits,
    CreditsGranted,
    Done,
    Drain,
    Draining,
    Error,
    ErrorCode,
    EventsLost,
    Farewell,
    Greeting,
    Mark,
    Medium,
    NamespaceOpened,
    Publish,
    Quarantine,
    Release,
    Role,
    Stats,
    Stored,
    Subscribe,
    Subscribed,
)
from tests.open_files import count_open_files
from tests.unit.daemon.express_peer import ExpressPeer
from tests.unit.daemon.raw_client import RawClient
from tests.unit.daemon.test_server import MEMORY, chain_parents, hashes_of, register_of

HASHES = hashes_of(3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    yield server
    server.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def connect(server: CacheServer, tmp_path: Path) -> Iterator[Any]:
    clients: list[RawClient] = []

    def make(engine: str = "engine", *, wants_express: bool = True) -> RawClient:
        client = RawClient(
            tmp_path / "s",
            register_of(),
            engine=engine,
            wants_express=wants_express,
            turn=lambda: server.turn(0.001),
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def save(client: RawClient, express: ExpressPeer, hashes: bytes = HASHES) -> None:
    granted = express.ask(Credits(name_space=client.name_space, group=0, count=len(hashes) // 32))
    assert isinstance(granted, CreditsGranted)
    express.tell(
        Publish(
            name_space=client.name_space,
            group=0,
            shard=0,
            tickets=granted.tickets,
            hashes=hashes,
            parents=chain_parents(hashes),
        )
    )
    assert express.ask(Mark()) == Done()


def acquire(client: RawClient, express: ExpressPeer) -> Acquired:
    answer = express.ask(Acquire(name_space=client.name_space, chain=HASHES))
    assert isinstance(answer, Acquired)
    return answer


def release(express: ExpressPeer, hit: Acquired) -> None:
    express.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))


def turn(server: CacheServer, count: int = 20) -> None:
    for _ in range(count):
        server.turn(0.001)


def test_who_wants_one_gets_one_once_it_has_registered(connect: Any) -> None:
    client = connect()
    express = client.receive_express()
    save(client, express)
    assert client.index.lookup(client.name_space, 0, HASHES).all()
    hit = acquire(client, express)
    assert hit.boundary == 48
    # The control channel serves as before, of what the express channel holds too.
    counts = client.ask(Stats())
    assert (counts.leases, counts.readable) == (1, 3)
    client.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))
    assert client.ask(Stats()).leases == 0


def test_who_wants_none_gets_none(server: CacheServer, connect: Any) -> None:
    client = connect(wants_express=False)
    assert isinstance(client.ask(Stats()), Counts)
    turn(server)
    assert client.lifeline.receive() is None


def test_each_process_of_a_session_has_its_own(connect: Any) -> None:
    first, second = connect(), connect()
    assert first.session == second.session
    channels = [client.receive_express() for client in (first, second)]
    save(first, channels[0])
    hit = acquire(second, channels[1])
    # Their rights are the session's.
    release(channels[0], hit)
    assert channels[0].ask(Mark()) == Done()
    assert first.ask(Stats()).leases == 0


def test_a_process_of_a_registered_session_gets_it_when_it_greets(connect: Any) -> None:
    connect()
    second = connect()
    # It came before anything was said on the control channel of this one.
    assert len(second._express) == 1


def test_nobody_gets_a_second_one(server: CacheServer, connect: Any) -> None:
    client = connect()
    client.receive_express()
    client.ask(register_of())
    turn(server)
    client._receive_lifeline()
    assert client._express == []


def test_without_room_the_control_channel_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_CHANNELS", 0)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    client = RawClient(tmp_path / "s", register_of(), wants_express=True, turn=lambda: server.turn(0.001))
    granted = client.ask(Credits(name_space=client.name_space, group=0, count=3))
    assert isinstance(granted, CreditsGranted)
    turn(server)
    assert client.lifeline.receive() is None
    client.close()
    server.close()


def test_a_quarantine_ends_it(connect: Any) -> None:
    first, second, other = connect(), connect(), connect("other")
    channels = [client.receive_express() for client in (first, second, other)]
    first.tell(Abort(tickets=b""), number=2)
    for client, channel in zip((first, second), channels[:2], strict=True):
        assert isinstance(client.receive_event(), Quarantine)
        channel.wait_for_end()
    assert channels[2].ask(Mark()) == Done()


def test_a_farewell_ends_it(connect: Any) -> None:
    client = connect()
    express = client.receive_express()
    assert client.lifeline.send(CODEC.encode_call(Farewell(), number=1, channel=Channel.LIFELINE))
    express.wait_for_end()


def test_the_end_of_a_lifeline_ends_it(connect: Any) -> None:
    client = connect()
    express = client.receive_express()
    client.lifeline.close()
    express.wait_for_end()


def test_a_process_that_greets_anew_has_left_its_channel(connect: Any) -> None:
    """It belongs to another session now."""
    client = connect()
    express = client.receive_express()
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="other", role=Role.WORKER)
    data = CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE)
    assert client.lifeline.send(data)
    express.wait_for_end()


def test_a_subscriber_hears_of_what_is_stored_by_express(connect: Any) -> None:
    engine, router = connect(), connect("router")
    express = engine.receive_express()
    before, after = hashes_of(2, seed=2), hashes_of(2, seed=3)
    save(engine, express, before)
    assert router.ask(Subscribe()) == Subscribed()
    save(engine, express, after)
    assert [router.receive(number) for number in (1, 2)] == [
        NamespaceOpened(name_space=engine.name_space, fingerprint=register_of().fingerprint),
        Stored(
            name_space=engine.name_space,
            medium=Medium.MEMORY,
            group=0,
            hashes=after,
            parents=chain_parents(after),
        ),
    ]


def test_a_subscriber_hears_of_what_was_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_LOGGED", 2)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    engine = RawClient(tmp_path / "s", register_of(), wants_express=True, turn=lambda: server.turn(0.001))
    assert engine.ask(Subscribe()) == Subscribed()
    save(engine, engine.receive_express())
    assert engine.receive(1) == EventsLost(count=3)
    engine.close()
    server.close()


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_a_server_that_ends_takes_back_what_is_held_by_express(server: CacheServer, connect: Any, how: str) -> None:
    client = connect()
    express = client.receive_express()
    save(client, express)
    hit = acquire(client, express)
    granted = express.ask(Credits(name_space=client.name_space, group=0, count=1))
    assert isinstance(granted, CreditsGranted)
    if how == "stop":
        server.stop()
        assert server.turn(0.001)
    else:
        assert isinstance(client.ask(Drain()), Draining)
        assert server.turn(0.001)
    refused = express.ask(Acquire(name_space=client.name_space, chain=HASHES))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.DRAINING
    assert server.turn(0.001)
    release(express, hit)
    assert express.ask(Mark()) == Done()
    assert server.turn(0.001)
    express.tell(Abort(tickets=granted.tickets))
    express._turn = lambda: None
    assert express.ask(Mark()) == Done()
    assert not server.turn(0.001)


def test_the_end_of_a_server_ends_it(tmp_path: Path) -> None:
    before = count_open_files()
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    client = RawClient(tmp_path / "s", register_of(), wants_express=True, turn=lambda: server.turn(0.001))
    express = client.receive_express()
    server.close()
    express._turn = lambda: None
    express.wait_for_end()
    del express
    client.close()
    del client
    assert count_open_files() == before
