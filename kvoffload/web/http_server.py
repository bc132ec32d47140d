"""Takes HTTP connections, so many and so long, and has each request answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.packets import accept_open
from kvoffload.tcp_peers import name_peer
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


@dataclass(eq=False)
class _Connection:
    task: asyncio.Task[None]
    peer: str
    """Name of the user or address, by which it shares the places."""


Handler = Callable[[Request], Awaitable[Response]]
BodyLimit = Callable[[RequestHead], int]
"""Bytes that may follow a head. HttpError: none may."""
BACKLOG = 4096
"""Number of connections that may wait to be accepted, if the machine's `net.core.somaxconn` permits as many. The kernel
drops more of them, and their clients try again after one second, after three, and so on."""
ACCEPTS_AT_ONCE = 64
"""Number of connections that are accepted in one turn of the loop. Each has a descriptor until it has been served or
closed."""
PAUSE_S = 0.1
"""Seconds until connections are accepted again, if there was no descriptor left for one."""
_NAMES_OF_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    address: TcpAddress
    max_connections: int = 64
    """One more takes the place of another, of the user or address that has most of them: of the one that has waited for
    its client longest."""
    read_s: float = 10.0
    """For a request that has begun, and to take an answer."""
    idle_s: float = 60.0


class HttpServer:
    """Serves HTTP in one loop. `answer` may raise HttpError; anything else that it raises is a 500, and one line in the
    log."""

    def __init__(
        self, settings: HttpSettings, answer: Handler, *, find_body_limit: BodyLimit = lambda _: MAX_BODY_BYTES
    ) -> None:
        self._settings = settings
        self._answer = answer
        self._find_body_limit = find_body_limit
        self._listener: socket.socket | None = None
        self._has_warned = False
        """Whether the log says that connections cannot be accepted; cleared when one can."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[_Connection] = set()
        self._waiting: dict[_Connection, None] = {}
        """Connections that wait for their client: to send a request or the rest of one, or to read its answer. The one
        that has waited longest comes first."""

    @property
    def address(self) -> TcpAddress:
        """Where it listens, with the port that it got."""
        assert self._listener is not None
        return TcpAddress(self._settings.address.host, self._listener.getsockname()[1])

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._open)

    @property
    def waiting_connections(self) -> int:
        """How many of the connections wait for their client."""
        return len(self._waiting)

    async def start(self) -> None:
        """Starts to listen. ConfigError: listening at this address is not possible."""
        address = self._settings.address
        family = socket.AF_INET6 if address.is_version_6 else socket.AF_INET
        try:
            self._listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as fault:
            raise ConfigError(
                f"cannot listen for HTTP at {address}: {fault.strerror or fault}",
                remedy="choose another address of this machine, or port",
            ) from fault
        self._listener.setblocking(False)
        self._watch(self._listener)

    async def close(self) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        if listener.fileno() != -1:
            asyncio.get_running_loop().add_reader(listener, self._accept_some, listener)

    def _accept_some(self, listener: socket.socket) -> None:
        """Accepts connections. Those that have been closed meanwhile are let go at once, so that a client that opens
        and closes connections as fast as it can keeps no other waiting for long."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                end = accept_open(listener)
            except OSError as fault:
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("no HTTP connection can be accepted for now: %s", fault.strerror)
                loop.remove_reader(listener)
                loop.call_later(PAUSE_S, self._watch, listener)
                return
            self._has_warned = False
            if end is None:
                return
            task = loop.create_task(self._serve(end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, end: socket.socket) -> None:
        """Serves one connection."""
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = _Connection(task, name_peer(end))
        except OSError:
            end.close()
            return
        reader, writer = await asyncio.open_connection(sock=end, limit=MAX_HEAD_BYTES)
        has_room = self._make_room(connection.peer)
        self._open.add(connection)
        try:
            if has_room:
                await self._take_requests(connection, reader, writer)
            else:
                busy = HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "there are as many connections as there may be")
                await self._send(connection, writer, fault_response(busy).pack(is_last=True, has_body=True))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone, or is too slow
        finally:
            self._open.discard(connection)
            self._waiting.pop(connection, None)
            with contextlib.suppress(OSError):
                writer.close()

    def _make_room(self, peer: str) -> bool:
        """Makes room for one more connection of this peer. False: all connections of the peer that has most are being
        answered, and this one has as many."""
        if len(self._open) < self._settings.max_connections:
            return True
        counts = Counter(connection.peer for connection in self._open)
        most = max(counts.values())
        waiting = (one for one in self._waiting if counts[one.peer] == most)
        answered = (one for one in self._open if counts[one.peer] == most > counts[peer] + 1)
        chosen = next(waiting, None) or next(answered, None)
        if chosen is None:
            return False
        self._waiting.pop(chosen, None)
        self._open.discard(chosen)
        chosen.task.cancel()
        return True

    async def _take_requests(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            self._waiting[connection] = None
            async with asyncio.timeout(self._settings.idle_s):
                first = await reader.readexactly(1)
            try:
                async with asyncio.timeout(self._settings.read_s):
                    request = await self._read(first, reader)
            except HttpError as fault:
                # Where the next request begins is not known any more.
                await self._send(connection, writer, fault_response(fault).pack(is_last=True, has_body=True))
                return
            self._waiting.pop(connection, None)
            response = await self._find_answer(request)
            is_last = request.head.is_last
            data = response.pack(is_last=is_last, has_body=request.head.method != "HEAD")
            await self._send(connection, writer, data)
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
        if "host" not in head.headers or not self._settings.address.is_loopback:
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

    async def _send(self, connection: _Connection, writer: asyncio.StreamWriter, data: bytes) -> None:
        self._waiting[connection] = None
        async with asyncio.timeout(self._settings.read_s):
            writer.write(data)
            await writer.drain()
        self._waiting.pop(connection, None)
