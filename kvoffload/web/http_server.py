"""Takes HTTP connections, so many and so long, and has each request answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.web.http_message import (
    HEAD_END,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    HttpError,
    Request,
    RequestHead,
    Response,
    fault_response,
    parse_head,
)

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
BodyLimit = Callable[[RequestHead], int]
"""Bytes that may follow a head. HttpError: none may."""
_NAMES_OF_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class HttpTerms:
    address: TcpAddress
    max_connections: int = 64
    """One more takes the place of the one that has said nothing for longest, if there is such a one."""
    read_s: float = 10.0
    """For a request that has begun, and to take an answer."""
    idle_s: float = 60.0


class HttpServer:
    """Serves HTTP in one loop. `answer` may raise HttpError; anything else that it raises is a 500, and one line in the
    log."""

    def __init__(
        self, terms: HttpTerms, answer: Handler, *, find_body_limit: BodyLimit = lambda _: MAX_BODY_BYTES
    ) -> None:
        self._terms = terms
        self._answer = answer
        self._find_body_limit = find_body_limit
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Between two requests; the one that has been for longest is first."""

    @property
    def address(self) -> TcpAddress:
        """Where it listens, with the port that it got."""
        assert self._server is not None
        return TcpAddress(self._terms.address.host, self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """How many of the connections nothing is asked on now."""
        return len(self._idle)

    async def start(self) -> None:
        """Begins to listen. ConfigError: nobody can listen there."""
        address = self._terms.address
        family = socket.AF_INET6 if address.is_version_6 else socket.AF_INET
        try:
            self._server = await asyncio.start_server(
                self._serve, address.host, address.port, family=family, limit=MAX_HEAD_BYTES
            )
        except OSError as fault:
            raise ConfigError(
                f"nobody can listen for HTTP at {address}: {fault.strerror or fault}",
                remedy="choose another address of this machine, or port",
            ) from fault

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._make_room()
        self._open.add(task)
        try:
            if len(self._open) > self._terms.max_connections:
                busy = HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "there are as many connections as there may be")
                await self._send(writer, fault_response(busy).pack(is_last=True, has_body=True))
            else:
                await self._take_requests(task, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # whoever asked has gone, or is too slow
        finally:
            self._open.discard(task)
            self._idle.pop(task, None)
            with contextlib.suppress(OSError):
                writer.close()

    def _make_room(self) -> None:
        if len(self._open) >= self._terms.max_connections and self._idle:
            longest = next(iter(self._idle))
            del self._idle[longest]
            self._open.discard(longest)
            longest.cancel()

    async def _take_requests(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            self._idle[task] = writer
            async with asyncio.timeout(self._terms.idle_s):
                first = await reader.readexactly(1)
            self._idle.pop(task, None)
            try:
                async with asyncio.timeout(self._terms.read_s):
                    request = await self._read(first, reader)
            except HttpError as fault:
                # Where the next request begins is not known any more.
                await self._send(writer, fault_response(fault).pack(is_last=True, has_body=True))
                return
            response = await self._find_answer(request)
            is_last = request.head.is_last
            await self._send(writer, response.pack(is_last=is_last, has_body=request.head.method != "HEAD"))
            if is_last:
                return

    async def _read(self, first: bytes, reader: asyncio.StreamReader) -> Request:
        try:
            head = parse_head((first + await reader.readuntil(HEAD_END)).removesuffix(HEAD_END))
        except asyncio.LimitOverrunError as fault:
            text = f"a request's head may have {MAX_HEAD_BYTES} bytes"
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text) from fault
        self._check_host(head)
        limit = self._find_body_limit(head) if head.body_bytes else 0
        if head.body_bytes > limit:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {limit} bytes")
        return Request(head=head, body=await reader.readexactly(head.body_bytes) if head.body_bytes else b"")

    def _check_host(self, head: RequestHead) -> None:
        """Refuses other names than ours on loopback: a page from elsewhere that is shown here could use one to ask
        us."""
        if "host" not in head.headers or not self._terms.address.is_loopback:
            return
        host = head.headers["host"].rpartition("]")[0].lstrip("[") or head.headers["host"].partition(":")[0]
        if host.lower() not in _NAMES_OF_LOOPBACK:
            raise HttpError(HTTPStatus.MISDIRECTED_REQUEST, "this is no name of this machine's loopback")

    async def _find_answer(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except HttpError as fault:
            return fault_response(fault)
        except Exception:
            logger.exception("%s %s failed", request.head.method, request.head.path)
            return fault_response(HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "this failed; the log says why"))

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        async with asyncio.timeout(self._terms.read_s):
            writer.write(data)
            await writer.drain()
