"""A server in a process of its own, nonsense on every way in, and a good client that must not notice.

The kernel tells the server's cost: its memory and descriptors, before and after thousands of connections.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.errors import PacketError
from kvoffload.packets import PacketSocket
from kvoffload.protocol import (
    CODEC,
    MESSAGES,
    Channel,
    Clear,
    ClientMessage,
    Counts,
    Drain,
    Greeting,
    Hello,
    Mark,
    Role,
    Stats,
)
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.protocol.shape import Shape
from kvoffload.server.channels.lifelines import MAX_UNGREETED
from kvoffload.server.channels.tcp_gate import MAX_OF_ONE_HOST, MAX_UNPROVEN
from kvoffload.units import MIB
from tests.kit.children import child
from tests.kit.protocol.any_bytes import ANYTHING, OPS
from tests.kit.protocol.examples import draw_message, make_example
from tests.kit.protocol.golden import make_frame
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient
from tests.kit.server.remote_client import RemoteClient, make_keys

TIMEOUT_S = 60.0
GROWTH_BYTES = 16 * MIB
"""Allowed for allocators; thousands of anything that is kept cost more."""
HANDSHAKE_MS = 1500
"""Time that the server gives a handshake. A good client's takes milliseconds, and longer on a busy machine."""
SERVER_KEYS, KNOWN = make_keys(), make_keys()
SERVER = """
import sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server import Guest, TcpSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.key_files import KeyPair
from kvoffload.config.tcp_address import TcpAddress
public, secret, known, wait_ms = sys.argv[2:]
keys, guests = KeyPair(public.encode(), secret.encode()), {known: Guest(domain="")}
remote = TcpSettings(address=TcpAddress("127.0.0.1", 0), keys=keys, guests=guests, handshake_ms=int(wait_ms))
memory = CacheSettings(memory_bytes=64 << 20, segment_bytes=64 << 20)
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": memory}, remote=remote))
print(server.remote_endpoint, flush=True)
server.run()
"""


class Served:
    """The server, and good clients of both kinds."""

    def __init__(self, path: Path, process: subprocess.Popen[str], endpoint: str) -> None:
        self.path, self.process, self.endpoint = path, process, endpoint
        self.port = int(endpoint.rpartition(":")[2])
        self.local = RawClient(path, register_of(), engine="good")
        save(self.local, hashes_of(3), 1)
        self.remote = self.connect_remote()
        self.remote.hello()

    def connect_remote(self) -> RemoteClient:
        return RemoteClient(self.endpoint, keys=KNOWN, server_key=SERVER_KEYS.public)

    def connect_tcp(self, host: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S, source_address=(f"127.0.1.{host}", 0))

    def connect_unix(self) -> PacketSocket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(self.path))
        return PacketSocket(connected)

    def check(self) -> None:
        """Good clients see no error."""
        for client in (self.local, self.remote):
            answer = client.ask(Stats())
            assert isinstance(answer, Counts), answer
            assert answer.readable == 3

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def count_sockets(self) -> int:
        """Without what sessions keep until their processes, this one, have exited."""
        count = 0
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += os.readlink(file).startswith("socket:")
        return count

    def measure_rss_bytes(self) -> int:
        (line,) = (
            line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "VmRSS" in line
        )
        return int(line.split()[1]) * 1024

    def bear(self, act: Callable[[int], None], times: int) -> None:
        """Once to grow what grows once, and then again."""
        before = self.count_files()
        for at in range(times // 4):
            act(at)
        self.wait(lambda: self.count_files() <= before)
        begun = self.measure_rss_bytes()
        for at in range(times):
            act(at)
            if at % 256 == 0:
                self.check()
        self.check()
        self.wait(lambda: self.count_files() <= before)
        assert self.measure_rss_bytes() - begun < GROWTH_BYTES
        assert self.process.poll() is None

    def wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end
            self.check()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        keys = [key.decode() for key in (SERVER_KEYS.public, SERVER_KEYS.secret, KNOWN.public)]
        with child(["-c", SERVER, f"{folder}/s", *keys, str(HANDSHAKE_MS)]) as process:
            assert process.stdout is not None
            made = Served(Path(folder) / "s", process, process.stdout.readline().strip())
            yield made
            made.local.close()
            made.remote.close()


FRAMES = (
    st.binary(max_size=300)
    | ANYTHING.map(msgpack.packb)
    | st.tuples(
        st.sampled_from(OPS), st.lists(st.integers(0, 2**64 - 1), max_size=3), st.lists(ANYTHING, max_size=12)
    ).map(lambda parts: msgpack.packb([parts[0], *parts[1], *parts[2]]))
    | draw_message(MESSAGES).map(lambda message: make_frame(message, 1))
)


@pytest.fixture(scope="module")
def talkers(served: Served) -> Iterator[list[zmq.Socket[bytes]]]:
    """Connections on which anything may be said: of a process that has greeted, and of a known key."""
    process, remote = RawClient(served.path, register_of(), engine="talker"), served.connect_remote()
    remote.hello()
    assert process.control is not None
    yield [process.control, remote.socket]
    remote.close()
    process.close()


# Without messages that end the server or clear its memory: a right one does so.
CALLS = draw_message(
    tuple(
        kind
        for kind in MESSAGES
        if issubclass(kind, ClientMessage) and Channel.CONTROL in kind.channels and kind not in (Drain, Clear)
    )
)


@given(
    st.lists(st.lists(FRAMES, min_size=1, max_size=2), max_size=5),
    st.lists(st.tuples(CALLS, st.integers(1, 5), st.just(0) | st.integers(0, 2**64 - 1)), max_size=8),
)
@settings(max_examples=60)
def test_whatever_is_said_on_the_control_channel(
    served: Served, messages: list[list[bytes]], calls: list[tuple[Any, int, int]]
) -> None:
    """Of a process that has joined, and of a key that is known."""
    process, remote = RawClient(served.path, register_of(), engine="talker"), served.connect_remote()
    remote.hello()
    assert process.control is not None
    for talker, session in ((process.control, process.session), (remote.socket, 0)):
        for message, number, expires_ns in calls:
            talker.send(CODEC.encode_call(message, number=number, session=session, expires_ns=expires_ns))
        for parts in messages:
            talker.send_multipart(parts)
    served.check()
    remote.close()
    process.close()


@contextmanager
def open_express(served: Served) -> Iterator[tuple[socket.socket, int]]:
    """A joined process's end, and its session."""
    process = RawClient(served.path, register_of(), engine="express")
    try:
        peer = process.express
        with socket.socket(fileno=os.dup(peer.fileno())) as end:
            end.settimeout(TIMEOUT_S)
            yield end, process.session
    finally:
        process.close()


def pack(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


@given(
    st.lists(st.tuples(CALLS, st.integers(1, 3), st.just(0) | st.integers(0, 2**64 - 1)), max_size=8),
    st.lists(FRAMES.map(pack) | st.binary(max_size=300), max_size=5),
)
@settings(max_examples=60)
def test_whatever_is_said_on_an_express_channel(
    served: Served, calls: list[tuple[Any, int, int]], others: list[bytes]
) -> None:
    with open_express(served) as (end, session), suppress(ConnectionError):
        for message, number, expires_ns in calls:
            end.sendall(pack(CODEC.encode_call(message, number=number, session=session, expires_ns=expires_ns)))
        for other in others:
            end.sendall(other)
        end.shutdown(socket.SHUT_WR)
        # The answers, and then its end.
        while end.recv(1 << 16):
            pass
    served.check()


def test_hundreds_of_broken_express_channels_leave_nothing(served: Served) -> None:
    mark = CODEC.encode_call(Mark(), number=1, session=1)
    wrong = [
        (FRAME_BYTES + 1).to_bytes(4, "little") + b"x",
        FRAME_BYTES.to_bytes(4, "little") + bytes(100_000),
        pack(b""),
        pack(mark) * 1000,
        pack(mark)[:7],
    ]

    before, begun = served.count_sockets(), served.measure_rss_bytes()
    for at in range(210):
        with open_express(served) as (end, _), suppress(ConnectionError):
            end.sendall(wrong[at % len(wrong)])
    served.wait(lambda: served.count_sockets() <= before)
    assert served.measure_rss_bytes() - begun < GROWTH_BYTES


def test_thousands_of_wrong_frames_leave_nothing(served: Served, talkers: list[zmq.Socket[bytes]]) -> None:
    wrong: list[Any] = [b"", b"\xc1", b"x" * 5000, msgpack.packb([[]] * 200), msgpack.packb([2, 1, 0, 0, "x"])]

    def talk(at: int) -> None:
        for talker in talkers:
            talker.send(wrong[at % len(wrong)])
            while talker.poll(0):
                talker.recv_multipart()

    served.bear(talk, 8000)


def test_whatever_is_sent_on_lifelines(served: Served) -> None:
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="junk", role=Role.OBSERVER)
    greeted = CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE)
    frames = [make_frame(message, 1) for message in map(_example, MESSAGES) if Channel.LIFELINE in message.channels]
    packets = [b"x", b"\xc1" * 60_000, greeted, *frames]
    reading, writing = os.pipe()
    files = [[], [reading], [reading, writing] * 20, [os.open("/dev/null", os.O_RDONLY)] * 253, [os.pidfd_open(1)]]

    def connect(at: int) -> None:
        end = served.connect_unix()
        if at % 3:
            end.send(greeted)
        # It may have been let go, as it should.
        with suppress(PacketError):
            for step in range(4):
                end.send(packets[(at + step) % len(packets)], files[(at * 7 + step) % len(files)])
        end.close()

    try:
        served.bear(connect, 4000)
    finally:
        for file in {file for some in files for file in some}:
            os.close(file)


def test_processes_that_say_nothing_are_bounded(served: Served) -> None:
    before = served.count_files()
    with ExitStack() as opened:
        for _ in range(4 * MAX_UNGREETED):
            opened.callback(served.connect_unix().close)
        served.check()
        assert served.count_files() <= before + MAX_UNGREETED
    served.wait(lambda: served.count_files() <= before)


ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01"
GREETINGS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x01\x00\x02xx",
    os.urandom(5000),
    ZMTP,
    ZMTP + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    ZMTP + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x0f\x05HELLO\x04user\x04pass",
    ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8 + bytes(2000),
]


def test_garbage_over_tcp_leaves_nothing(served: Served) -> None:
    def connect(at: int) -> None:
        # It may have been let go, as it should.
        with suppress(ConnectionError), served.connect_tcp(at % 200 + 1) as connected:
            connected.sendall(GREETINGS[at % len(GREETINGS)])
            if at % 2:
                connected.shutdown(socket.SHUT_WR)
            # The server's greeting, or its end: clients that come faster than they are admitted wait a second for the
            # next try.
            connected.recv(1000)

    served.bear(connect, 2000)


@pytest.mark.parametrize("is_server_known", [True, False])
def test_thousands_of_wrong_keys_leave_nothing(served: Served, is_server_known: bool) -> None:
    server_key = SERVER_KEYS.public if is_server_known else make_keys().public
    unknown = make_keys()

    def connect(_: int) -> None:
        client = RemoteClient(served.endpoint, keys=unknown, server_key=server_key)
        if is_server_known:
            assert client.is_refused()
        client.close()

    served.bear(connect, 1000)


@pytest.mark.parametrize("said", [b"", ZMTP[:3], ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32)])
def test_who_does_not_finish_is_let_go(served: Served, said: bytes) -> None:
    """As many such connections as allowed are held: new clients wait, and connected ones do not notice."""
    before = served.count_files()
    with ExitStack() as opened:
        held: list[socket.socket] = []
        for at in range(2 * MAX_UNPROVEN):
            connected = opened.enter_context(served.connect_tcp(at // MAX_OF_ONE_HOST + 1))
            try:
                connected.sendall(said)
            except ConnectionError:
                continue
            held.append(connected)
        served.check()
        # The gate's two ends of each, and ZeroMQ's own. The client that has just looked may still be there.
        served.wait(lambda: served.count_files() <= before + 3 * MAX_UNPROVEN)
        for connected in held:
            connected.setblocking(False)
        served.wait(lambda: all(map(_is_let_go, held)))
    served.wait(lambda: served.count_files() <= before)
    late = served.connect_remote()
    late.hello()
    late.close()


def test_who_says_hello_again_and_again_is_one(served: Served) -> None:
    remote = served.connect_remote()
    remote.hello()

    def greet(_: int) -> None:
        remote.ask(Hello(protocol_min=1, protocol_max=1))

    served.bear(greet, 2000)
    remote.close()


def _is_let_go(connected: socket.socket) -> bool:
    try:
        while connected.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def _example(kind: Any) -> Any:
    return make_example(Shape(kind), version=1)
