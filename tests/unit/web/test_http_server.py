"""Connections as they come: many, slow, silent, pipelined, and with requests that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.web.http_message import HttpError, Request, RequestHead, Response
from kvoffload.web.http_server import HttpServer, HttpTerms

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
async def serving(**terms: float) -> AsyncIterator[HttpServer]:
    server = HttpServer(HttpTerms(address=LOOPBACK, **terms), answer)  # type: ignore[arg-type]
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
    server = HttpServer(HttpTerms(address=LOOPBACK), answer, find_body_limit=find_limit)
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


async def test_where_all_are_busy_a_newcomer_is_told() -> None:
    async with serving(max_connections=2) as server:
        busy = [await connect(server) for _ in range(2)]
        for _, writer in busy:
            writer.write(b"GET / HT")
        while server.idle_connections or server.connections < 2:
            await asyncio.sleep(0.01)
        reader, writer = await connect(server)
        assert (await read_answer(reader))[0] == 503
        for _, one in [*busy, (reader, writer)]:
            one.close()


async def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=f"nobody can listen for HTTP at {server.address}"):
            await HttpServer(HttpTerms(address=server.address), answer).start()
