"""A server and its express channels: who gets one, what of it others see, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.protocol import (
    CODEC,
    Abort,
    Acquire,
    Acquired,
    Channel,
    ClientMessage,
    Credits,
    CreditsGranted,
    Done,
    Drain,
    Draining,
    Error,
    ErrorCode,
    EventsLost,
    Express,
    Farewell,
    Greeting,
    HelloAccepted,
    Mark,
    Medium,
    NamespaceOpened,
    Prefetch,
    Publish,
    Quarantine,
    Release,
    Role,
    Stats,
    Stored,
    Subscribe,
    Subscribed,
)
from kvoffload.server.channels import express_channels
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.client.served import wait_for
from tests.kit.open_files import count_open_files
from tests.kit.server.blocks import MEMORY, chain_parents, hashes_of, register_of
from tests.kit.server.express_peer import ExpressPeer
from tests.kit.server.raw_client import RawClient

HASHES = hashes_of(3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    yield server
    server.close()
    # The lock's file stays where an engine was there to the end: the next server reads whose memory that has.
    assert [file for file in tmp_path.iterdir() if file.suffix != ".lock"] == []


@pytest.fixture
def connect(server: CacheServer, tmp_path: Path) -> Iterator[Any]:
    clients: list[RawClient] = []

    def make(engine: str = "engine") -> RawClient:
        client = RawClient(tmp_path / "s", register_of(), engine=engine, turn=lambda: server.turn(0.001))
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


def test_who_has_registered_gets_one(connect: Any) -> None:
    client = connect()
    express = client.express
    save(client, express)
    assert client.index.lookup(client.name_space, 0, HASHES).all()
    hit = acquire(client, express)
    assert hit.boundary == 48
    # Of what it holds, the control channel tells.
    counts = client.ask(Stats())
    assert (counts.leases, counts.readable) == (1, 3)


def test_blocks_are_served_whatever_the_loop_does(connect: Any) -> None:
    client = connect()
    client.express.turn = lambda: None
    save(client, client.express)
    hit = acquire(client, client.express)
    release(client.express, hit)
    assert client.express.ask(Mark()) == Done()


@pytest.mark.parametrize("message", [Acquire(name_space=0, chain=b""), Abort(tickets=b"")])
def test_blocks_go_by_no_other_channel(connect: Any, message: ClientMessage) -> None:
    client = connect()
    client.control.send(CODEC.encode_call(message, number=1, session=client.session, channel=Channel.EXPRESS))
    refused = client.receive(1)
    assert (refused.code, refused.about_op) == (ErrorCode.UNKNOWN_OPERATION, message.op)


def test_each_process_of_a_session_has_its_own(connect: Any) -> None:
    first, second = connect(), connect()
    assert first.session == second.session
    channels = [client.express for client in (first, second)]
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
    assert second.came.index(Express) < second.came.index(HelloAccepted)


def test_an_engine_gets_one_express_channel(server: CacheServer, connect: Any) -> None:
    client = connect()
    client.ask(register_of())
    turn(server)
    client.receive_lifeline()
    assert client.came.count(Express) == 1


def test_where_there_is_no_room_for_one_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_CHANNELS", 0)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    with pytest.raises(AssertionError, match="refused: there are too many express channels"):
        RawClient(tmp_path / "s", register_of(), turn=lambda: server.turn(0.001))
    server.close()


def test_a_quarantine_ends_it(connect: Any) -> None:
    first, second, other = connect(), connect(), connect("other")
    channels = [client.express for client in (first, second, other)]
    first.tell(Prefetch(name_space=first.name_space, chain=b""), number=2)
    for client, channel in zip((first, second), channels[:2], strict=True):
        assert isinstance(client.receive_event(), Quarantine)
        channel.wait_for_end()
    assert channels[2].ask(Mark()) == Done()


def test_a_farewell_ends_it(connect: Any) -> None:
    client = connect()
    express = client.express
    assert client.lifeline.send(CODEC.encode_call(Farewell(), number=1, channel=Channel.LIFELINE))
    express.wait_for_end()


def test_the_end_of_a_lifeline_ends_it(connect: Any) -> None:
    client = connect()
    express = client.express
    client.lifeline.close()
    express.wait_for_end()


def test_a_process_that_greets_anew_has_left_its_channel(connect: Any) -> None:
    """It belongs to another session now."""
    client = connect()
    express = client.express
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="other", role=Role.WORKER)
    data = CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE)
    assert client.lifeline.send(data)
    express.wait_for_end()


def test_a_subscriber_hears_of_what_is_stored_by_express(connect: Any) -> None:
    engine, router = connect(), connect("router")
    express = engine.express
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
    engine = RawClient(tmp_path / "s", register_of(), turn=lambda: server.turn(0.001))
    assert engine.ask(Subscribe()) == Subscribed()
    save(engine, engine.express)
    assert engine.receive(1) == EventsLost(count=3)
    engine.close()
    server.close()


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_a_server_that_ends_takes_back_what_is_held_by_express(server: CacheServer, connect: Any, how: str) -> None:
    client = connect()
    express = client.express
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
    express.turn = lambda: None
    assert express.ask(Mark()) == Done()
    assert not server.turn(0.001)


def test_the_end_of_a_server_ends_it(tmp_path: Path) -> None:
    before = count_open_files()
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    client = RawClient(tmp_path / "s", register_of(), turn=lambda: server.turn(0.001))
    express = client.express
    server.close()
    express.turn = lambda: None
    express.wait_for_end()
    del express
    client.close()
    del client
    # Other threads of the server close what others have sent.
    wait_for(lambda: count_open_files() == before)
