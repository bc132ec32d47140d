"""The control channel over TCP, on a real server: keys, the allow-list, and what a key is worth."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
import zmq

from kvoffload.cache import CacheSettings
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError, ProtocolError
from kvoffload.key_files import KeyPair
from kvoffload.protocol import (
    CODEC,
    Counts,
    Drain,
    Draining,
    Error,
    ErrorCode,
    Hello,
    NamespaceOpened,
    Stats,
    Stored,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.survey import BlocksFound, FindBlocks
from kvoffload.server import DomainSettings, Guest
from kvoffload.server.channels.remote_control import (
    ANSWER_BYTES,
    DROPPED_AT_ONCE,
    FRAME_BYTES,
    QUEUED_OUT,
    UNREAD_BYTES,
    RemoteControl,
)
from kvoffload.server.channels.tcp_gate import MAX_CONNECTIONS, MAX_OF_ONE_HOST, MAX_UNPROVEN
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.operators.survey import GUEST_BLOCKS
from kvoffload.server.sessions.settings import TcpSettings
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN, fingerprint
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.gate_loop import Loop
from tests.kit.server.raw_client import RawClient
from tests.kit.server.remote_client import RemoteClient, make_keys

LOOPBACK = TcpAddress("127.0.0.1", 0)
MEMORY = CacheSettings(memory_bytes=64 * MIB, segment_bytes=64 * MIB)
SERVER, RED, BLUE, CHIEF, UNKNOWN = (make_keys() for _ in range(5))
SETTINGS = TcpSettings(
    address=LOOPBACK,
    keys=SERVER,
    guests={
        RED.public.decode(): Guest(domain="red"),
        BLUE.public.decode(): Guest(domain="blue"),
        CHIEF.public.decode(): Guest(domain="red", is_operator=True),
    },
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    plan = ServerPlan(
        socket=tmp_path / "s",
        memory={"red": MEMORY, "blue": MEMORY},
        domains=(DomainSettings(name="red"), DomainSettings(name="blue")),
        remote=SETTINGS,
    )
    server = CacheServer(plan)
    yield server
    server.close()
    # The lock's file stays where an engine was there to the end: the next server reads whose memory that has.
    assert [file for file in tmp_path.iterdir() if file.suffix != ".lock"] == []


class Connect(Protocol):
    def __call__(self, server: CacheServer, keys: KeyPair | None, server_key: bytes = ...) -> RemoteClient: ...


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as opened:

        def make(server: CacheServer, keys: KeyPair | None, server_key: bytes = SERVER.public) -> RemoteClient:
            turn = partial(server.turn, 0.001)
            client = RemoteClient(server.remote_endpoint, keys=keys, server_key=server_key, turn=turn)
            opened.callback(client.close)
            return client

        yield make


def count_until_memory(client: RemoteClient) -> Counts:
    while True:
        answer = client.ask(Stats())
        if isinstance(answer, Counts):
            return answer
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.BUSY


def test_a_key_is_worth_its_domain(server: CacheServer, connect: Connect, tmp_path: Path) -> None:
    red, blue = connect(server, RED), connect(server, BLUE)
    assert (red.hello().domain, blue.hello().domain) == ("red", "blue")
    count_until_memory(blue)
    engine = RawClient(tmp_path / "s", register_of(), turn=lambda: server.turn(0.001))
    for client in (red, blue):
        assert client.ask(Subscribe()) == Subscribed()
    save(engine, hashes_of(3), 1)
    assert isinstance(red.receive(), NamespaceOpened)
    stored = red.receive()
    assert isinstance(stored, Stored)
    assert stored.hashes == hashes_of(3)
    assert (count_until_memory(red).readable, count_until_memory(blue).readable) == (3, 0)
    engine.close()


def test_another_domain_is_not_to_be_had(server: CacheServer, connect: Connect) -> None:
    red = connect(server, RED)
    answer = red.ask(Hello(protocol_min=1, protocol_max=1, domain="blue"))
    assert isinstance(answer, Error)
    assert (answer.code, answer.field) == (ErrorCode.MISMATCH, "domain")


def test_only_an_operators_key_drains(server: CacheServer, connect: Connect) -> None:
    red, chief = connect(server, RED), connect(server, CHIEF)
    red.hello()
    chief.hello()
    refused = red.ask(Drain())
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_ALLOWED
    assert isinstance(chief.ask(Drain()), Draining)
    for _ in range(1000):
        if not server.turn(0.001):
            break
    assert not server.turn(0.001)


def test_an_unknown_key_gets_nothing(server: CacheServer, connect: Connect) -> None:
    unknown, good = connect(server, UNKNOWN), connect(server, RED)
    unknown.socket.send(CODEC.encode_call(Hello(protocol_min=1, protocol_max=1), number=1))
    assert unknown.is_refused()
    good.hello()
    assert not unknown.socket.poll(0)
    assert len(server.core.sessions) == 1


def test_no_number_of_connections_without_a_key_keeps_out_a_client_that_has_one(server: CacheServer) -> None:
    """They come all the time, each from another address, and say nothing."""
    assert server.channels.remote is not None
    address = ("127.0.0.1", server.channels.remote.gate.address.port)
    numbers = iter(range(256, 65_536))
    with ExitStack() as opened:

        def turn() -> None:
            number = next(numbers)
            keyless = opened.enter_context(socket.socket())
            keyless.setblocking(False)
            keyless.bind((f"127.0.{number // 256}.{number % 256}", 0))
            keyless.connect_ex(address)
            server.turn(0.001)

        for _ in range(2 * MAX_UNPROVEN):
            turn()
        for _ in range(5):
            client = RemoteClient(server.remote_endpoint, keys=RED, server_key=SERVER.public, turn=turn)
            opened.callback(client.close)
            assert client.hello().domain == "red"
        assert server.channels.remote.gate.unproven == MAX_UNPROVEN


@pytest.mark.parametrize("is_keyless", [True, False])
def test_who_does_not_know_the_servers_key_gets_nothing(
    server: CacheServer, connect: Connect, is_keyless: bool
) -> None:
    stranger = connect(server, None if is_keyless else RED, server_key=UNKNOWN.public)
    good = connect(server, RED)
    stranger.socket.send(CODEC.encode_call(Hello(protocol_min=1, protocol_max=1), number=1))
    good.hello()
    for _ in range(100):
        server.turn(0.001)
    assert not stranger.socket.poll(0)
    assert len(server.core.sessions) == 1


class Announced(dict[str, Guest]):
    """Guests of which another thread removes one while it is looked up: found, and gone before it is read."""

    def __init__(self, *guests: KeyPair) -> None:
        super().__init__({keys.public.decode(): Guest(domain="") for keys in guests})
        self.gone: set[str] = set()

    def get(self, key: str, default: object = None) -> Guest:  # type: ignore[override]
        if key in self.gone:
            raise KeyError(key)
        return self[key]


def test_who_is_taken_away_is_heard_no_more_and_ends_nothing(connect: Connect, tmp_path: Path) -> None:
    guests = Announced(RED, BLUE)
    remote = TcpSettings(address=LOOPBACK, keys=SERVER, guests=guests)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, remote=remote))
    red, blue = connect(server, RED), connect(server, BLUE)
    red.hello()
    blue.hello()
    guests.gone.add(RED.public.decode())
    for number in range(100):
        red.socket.send(CODEC.encode_call(Stats(), number=number + 9, session=0))
    count_until_memory(blue)
    assert not red.socket.poll(0)
    server.close()


def test_frames_of_nobody_take_one_turn_of_the_loop_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their key was taken away while they were connected."""
    remote = RemoteControl(TcpSettings(address=LOOPBACK, keys=SERVER, guests={}), tmp_path / "inner", Loop())
    frames = iter(range(DROPPED_AT_ONCE))
    router, _ = remote.sockets
    sender = {"User-Id": RED.public.decode()}
    monkeypatch.setattr(router, "recv_multipart", lambda *_, **__: [next(frames), sender])
    assert remote.receive() is None
    assert next(frames, None) is None
    remote.close()


def test_a_client_that_takes_anothers_name_is_not_taken_for_it(server: CacheServer, connect: Connect) -> None:
    """Clients may choose the name by which ZeroMQ knows them; after one has gone, another may have it."""
    chief = connect(server, CHIEF)
    chief.socket.disconnect(server.remote_endpoint)
    chief.socket.setsockopt(zmq.ROUTING_ID, b"name")
    chief.socket.connect(server.remote_endpoint)
    chief.hello()
    chief.close()
    red = connect(server, RED)
    red.socket.disconnect(server.remote_endpoint)
    red.socket.setsockopt(zmq.ROUTING_ID, b"name")
    remote = server.channels.remote
    assert remote is not None
    (key,) = (key for session in server.core.sessions for key in session.connections)
    red.wait(lambda: not remote.send(key, b"is the name free?"))
    red.socket.connect(server.remote_endpoint)
    refused = red.ask(Drain())
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NO_SESSION
    red.hello()
    refused = red.ask(Drain())
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_ALLOWED


def test_a_frame_that_is_too_long_ends_its_connection_alone(server: CacheServer, connect: Connect) -> None:
    red, blue = connect(server, RED), connect(server, BLUE)
    red.hello()
    blue.hello()
    while red.events.poll(0):
        red.events.recv_multipart()
    red.socket.send(bytes(FRAME_BYTES + 1))
    # It connects again as a new client, which the server does not know. Messages sent before are lost.
    red.wait(lambda: bool(red.events.poll(0)))
    count_until_memory(blue)
    answer = red.ask(Stats())
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.NO_SESSION


def test_beyond_loopback_it_binds_with_keys(tmp_path: Path) -> None:
    remote = RemoteControl(
        TcpSettings(address=TcpAddress("0.0.0.0", 0), keys=SERVER, guests={}), tmp_path / "inner", Loop()
    )
    assert remote.endpoint.startswith("tcp://0.0.0.0:")
    remote.close()
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = TcpAddress("127.0.0.1", taken.getsockname()[1])
        remote = TcpSettings(address=address, keys=SERVER, guests={})
        with pytest.raises(ConfigError, match="Address already in use"):
            CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, remote=remote))
    assert list(tmp_path.iterdir()) == []


def test_without_a_key_nothing_is_to_be_had_on_loopback_either(server: CacheServer, connect: Connect) -> None:
    """A client without keys is refused even if it claims the name that belongs to an operator's key."""
    unkeyed, good = connect(server, None), connect(server, RED)
    unkeyed.socket.disconnect(server.remote_endpoint)
    unkeyed.socket.setsockopt(zmq.METADATA, b"X-User-Id:" + CHIEF.public)
    unkeyed.socket.connect(server.remote_endpoint)
    for number, message in enumerate((Hello(protocol_min=1, protocol_max=1), Stats(), Drain()), 1):
        unkeyed.socket.send(CODEC.encode_call(message, number=number, session=0))
    good.hello()
    count_until_memory(good)
    assert not unkeyed.socket.poll(0)
    assert len(server.core.sessions) == 1


def test_what_a_client_says_of_itself_makes_it_nobody_else(server: CacheServer, connect: Connect) -> None:
    red = connect(server, RED)
    red.socket.disconnect(server.remote_endpoint)
    red.socket.setsockopt(zmq.METADATA, b"X-User-Id:" + CHIEF.public)
    red.socket.connect(server.remote_endpoint)
    red.hello()
    refused = red.ask(Drain())
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_ALLOWED


def test_what_a_client_has_not_read_is_bounded_in_bytes(server: CacheServer) -> None:
    """The bound holds for frames of any size, because the number of frames is bounded too."""
    assert QUEUED_OUT * ANSWER_BYTES <= UNREAD_BYTES
    assert UNREAD_BYTES * MAX_OF_ONE_HOST <= 256 * MIB
    assert UNREAD_BYTES * MAX_CONNECTIONS <= 1024 * MIB
    client = RemoteClient(server.remote_endpoint, keys=RED, server_key=SERVER.public, turn=lambda: server.turn(0.001))
    client.hello("red")
    remote = server.channels.remote
    assert remote is not None
    (key,) = (key for session in server.core.sessions for key in session.connections)
    with pytest.raises(ProtocolError):
        remote.send(key, bytes(ANSWER_BYTES + 1))
    sent = 0
    while remote.send(key, bytes(ANSWER_BYTES)):
        sent += ANSWER_BYTES
        # The kernel's and ZeroMQ's own buffers on both sides take some more.
        assert sent <= 16 * UNREAD_BYTES
    assert sent >= ANSWER_BYTES
    client.close()


def test_a_search_over_tcp_tells_of_no_more_than_may_be_unread(server: CacheServer) -> None:
    client = RemoteClient(server.remote_endpoint, keys=CHIEF, server_key=SERVER.public, turn=lambda: server.turn(0.001))
    client.hello("red")
    client.wait(lambda: "red" in server.pools.caches)
    cache = server.pools.caches["red"]
    name_space = cache.open_namespace(fingerprint("model"), PLAIN)
    session = cache.open_session()
    hashes = hashes_of(3000)
    slots = cache.reserve(session, name_space, 0, hashes=hashes)
    cache.commit(session, name_space, 0, slots.tickets, hashes=hashes)
    found = client.ask(FindBlocks())
    assert isinstance(found, BlocksFound)
    assert (found.total, len(found.hashes) // 32) == (3000, GUEST_BLOCKS)
    client.close()
