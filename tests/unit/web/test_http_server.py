"""Connections as they come: many, slow, silent, pipelined, and with requests that fail."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

import pytest

from kvoffload import native
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.web import http_server
from kvoffload.web.http_message import HttpError, Request, RequestHead, Response
from kvoffload.web.http_server import HttpServer, HttpSettings

LOOPBACK = TcpAddress("127.0.0.1", 0)
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(request: Request) -> Response:
    if request.head.path == "/fails":
        raise RuntimeError("not today")
    if request.head.path == "/refused":
        raise HttpError(HTTPStatus.NOT_FOUND, "it is not there")
    return Response(body=f"{request.head.method} {request.head.path} {len(request.body)}".encode())


@asynccontextmanager
async def serving(**settings: float) -> AsyncIterator[HttpServer]:
    server = HttpServer(HttpSettings(address=LOOPBACK, **settings), answer)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def connect(server: HttpServer) -> Ends:
    return await asyncio.open_connection(server.address.host, server.address.port)


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length) if has_body else b""


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(GET % b"/a" + b"POST /b HTTP/1.1\r\nHost: [::1]:9\r\nContent-Length: 3\r\n\r\nabc" + GET % b"/c")
        assert [await read_answer(reader) for _ in range(3)] == [
            (200, b"GET /a 0"),
            (200, b"POST /b 3"),
            (200, b"GET /c 0"),
        ]
        writer.write(b"HEAD /a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert await read_answer(reader, has_body=False) == (200, b"")
        assert await reader.read() == b""
        writer.close()


async def test_a_fault_is_one_requests_and_not_the_connections(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(GET % b"/fails" + GET % b"/refused" + GET % b"/a")
        assert [await read_answer(reader) for _ in range(3)] == [
            (500, b'{"error":"this failed; the log says why"}\n'),
            (404, b'{"error":"it is not there"}\n'),
            (200, b"GET /a 0"),
        ]
        assert "GET /fails failed" in caplog.text
        writer.close()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n", 413),
    ],
)
async def test_what_cannot_be_read_ends_the_connection(said: bytes, status: int) -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(said)
        assert (await read_answer(reader))[0] == status
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        writer.close()


async def test_whose_body_may_be_longer_is_somebody_elses_word() -> None:
    def find_limit(head: RequestHead) -> int:
        if head.path == "/refused":
            raise HttpError(HTTPStatus.UNAUTHORIZED, "who are you?")
        return 100_000 if head.path == "/long" else 10

    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000\r\n\r\n"
    server = HttpServer(HttpSettings(address=LOOPBACK), answer, find_body_limit=find_limit)
    await server.start()
    try:
        for path, status in ((b"/long", 200), (b"/short", 413), (b"/refused", 401)):
            reader, writer = await connect(server)
            writer.write(head % path + b"x" * (70_000 if status == 200 else 0))
            assert (await read_answer(reader))[0] == status
            writer.close()
    finally:
        await server.close()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\na"]
)
async def test_whoever_is_silent_is_let_go(said: bytes) -> None:
    async with serving(read_s=0.05, idle_s=0.05) as server:
        reader, writer = await connect(server)
        writer.write(said)
        assert await reader.read() == b""
        writer.close()


async def test_many_connections_at_once_wait_and_none_has_to_try_again() -> None:
    """The kernel drops connections for which there is no room, and they come again after a second, or after three."""
    machine = int(Path("/proc/sys/net/core/somaxconn").read_text())
    async with serving() as server:
        assert count_waiting(server) == (0, min(http_server.BACKLOG, machine))


async def test_of_a_burst_a_bounded_number_is_accepted_in_a_turn() -> None:
    """Otherwise it takes all descriptors, and asyncio accepts no connection for a second."""
    burst = 3 * http_server.ACCEPTS_AT_ONCE + 1
    async with serving() as server:
        ends = []
        for _ in range(burst):
            ends.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            ends[-1].connect_ex((server.address.host, server.address.port))
        left = [count_waiting(server)[0]]
        assert left == [burst]
        while left[-1] and len(left) < 100:
            await asyncio.sleep(0)
            left.append(count_waiting(server)[0])
        assert left[-1] == 0
        assert max(before - after for before, after in pairwise(left)) == http_server.ACCEPTS_AT_ONCE
        for end in ends:
            end.close()


async def test_connections_that_have_been_closed_meanwhile_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving them would keep others waiting, as many as may wait to be accepted."""
    peers: list[str] = []
    monkeypatch.setattr(http_server, "name_peer", lambda _: peers.append("one") or peers[0])
    async with serving() as server:
        for _ in range(200):
            with socket.create_connection((server.address.host, server.address.port)):
                pass
        reader, writer = await connect(server)
        writer.write(GET % b"/")
        assert (await read_answer(reader))[0] == 200
        assert len(peers) == 1
        writer.close()


async def test_without_descriptors_connections_wait_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept_open, refused = native.accept_open, iter(range(3))

    def refuse_some(listener: int) -> int:
        return accept_open(listener) if next(refused, None) is None else -errno.EMFILE

    monkeypatch.setattr(http_server, "PAUSE_S", 0.01)
    async with serving() as server:
        monkeypatch.setattr(native, "accept_open", refuse_some)
        reader, writer = await connect(server)
        writer.write(GET % b"/")
        assert (await read_answer(reader))[0] == 200
        writer.close()
    assert caplog.text.count("Too many open files") == 1


def count_waiting(server: HttpServer) -> tuple[int, int]:
    """Returns how many connections wait to be accepted, and how many may, as the kernel counts them."""
    listening = server._listener  # private: only the kernel knows it, of the listening socket
    assert listening is not None
    told = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    waiting, limit = struct.unpack_from("=II", told, 24)
    return waiting, limit


async def test_one_more_connection_takes_the_place_of_the_most_idle() -> None:
    async with serving(max_connections=3) as server:
        ends = []
        for number in range(4):
            reader, writer = await connect(server)
            writer.write(GET % b"/%d" % number)
            assert (await read_answer(reader))[0] == 200
            ends.append((reader, writer))
        assert await ends[0][0].read() == b""
        ends[1][1].write(GET % b"/again")
        assert await read_answer(ends[1][0]) == (200, b"GET /again 0")
        for _, writer in ends:
            writer.close()


@pytest.mark.parametrize("is_one", [True, False], ids=["one user", "ever other addresses"])
async def test_connections_that_do_not_end_their_requests_give_way(
    monkeypatch: pytest.MonkeyPatch, is_one: bool
) -> None:
    """However many there are, and however often they are renewed."""
    numbers = iter(range(1_000_000))
    monkeypatch.setattr(http_server, "name_peer", lambda _: "one" if is_one else str(next(numbers)))
    slow = []
    async with serving(max_connections=8) as server:
        for at in range(20):
            for _ in range(2 * 8):
                slow.append(await connect(server))
                slow[-1][1].write(b"G")
            reader, writer = await connect(server)
            writer.write(GET % b"/%d" % at)
            assert await read_answer(reader) == (200, b"GET /%d 0" % at)
            writer.close()
        assert server.connections <= 8
        for _, one in slow:
            one.close()


async def test_who_does_not_read_its_answers_gives_way() -> None:
    async def answer_at_length(_: Request) -> Response:
        return Response(body=bytes(32 << 20))

    server = HttpServer(HttpSettings(address=LOOPBACK, max_connections=2), answer_at_length)
    await server.start()
    try:
        unread = [await connect(server) for _ in range(2)]
        for _, writer in unread:
            writer.write(GET % b"/")
        while server.waiting_connections < 2:
            await asyncio.sleep(0.01)
        reader, writer = await connect(server)
        writer.write(GET % b"/")
        assert (await read_answer(reader))[0] == 200
        for _, one in [*unread, (reader, writer)]:
            one.close()
    finally:
        await server.close()


@pytest.mark.parametrize(("peer", "status"), [("greedy", 503), ("modest", 200)])
async def test_where_all_are_being_answered_whoever_has_most_gives_way(
    monkeypatch: pytest.MonkeyPatch, peer: str, status: int
) -> None:
    peers = iter(["greedy", "greedy", peer])
    monkeypatch.setattr(http_server, "name_peer", lambda _: next(peers))
    goes_on = asyncio.Event()
    asked: list[str] = []

    async def answer_later(request: Request) -> Response:
        asked.append(request.head.path)
        if request.head.path == "/slow":
            await goes_on.wait()
        return Response(body=b"")

    server = HttpServer(HttpSettings(address=LOOPBACK, max_connections=2), answer_later)
    await server.start()
    try:
        slow = [await connect(server) for _ in range(2)]
        for _, writer in slow:
            writer.write(GET % b"/slow")
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        reader, writer = await connect(server)
        writer.write(GET % b"/quick")
        assert (await read_answer(reader))[0] == status
        for _, one in [*slow, (reader, writer)]:
            one.close()
    finally:
        await server.close()


async def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=f"cannot listen for HTTP at {server.address}"):
            await HttpServer(HttpSettings(address=server.address), answer).start()
