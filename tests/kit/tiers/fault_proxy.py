"""An HTTP proxy before a store, that answers as a test wants it to: not, not now, not all, or as it was before."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Fault(Enum):
    NONE = "none"
    ERROR = "error"
    """Status 500."""
    HANG = "hang"
    """No answer for as long as the proxy lives."""
    CUT = "cut"
    """Half of the bytes that were promised."""
    RESET = "reset"
    HUGE = "huge"
    """An answer that says it is longer than any memory."""
    ENDLESS = "endless"
    """An answer without an end, which comes as fast as it is read."""
    STALE = "stale"
    """The answer that this question had before."""


@dataclass(frozen=True)
class Asked:
    """A request: `what` is its path with its query."""

    verb: str
    what: str

    @property
    def is_list(self) -> bool:
        return "list-type=" in self.what


class FaultProxy(ThreadingHTTPServer):
    """`fault` says what becomes of a request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(endpoint).netloc
        self.fault: Callable[[Asked], Fault] = lambda asked: Fault.NONE
        self.asked: list[Asked] = []
        self.answers: dict[Asked, tuple[int, list[tuple[str, str]], bytes]] = {}
        """The first of each question."""
        self.is_over = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, verb: str, part: str = "") -> int:
        return sum(asked.verb == verb and part in asked.what for asked in self.asked)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, self.path)
        self.server.asked.append(asked)
        fault = self.server.fault(asked)
        if fault is Fault.HANG:
            self.server.is_over.wait()
        elif fault is Fault.RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
            self.close_connection = True
        elif fault is Fault.ERROR:
            self._answer(500, [], b"<Error><Code>InternalError</Code><Message>Not today.</Message></Error>")
        elif fault is Fault.HUGE:
            length = "99999999999"
            there = f"bytes 0-{int(length) - 1}/{length}"
            ranged = [("Content-Range", there)] if "Range" in self.headers else []
            dated = [("ETag", '"1"'), ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")]
            self._answer(206 if ranged else 200, [*ranged, *dated, ("Content-Length", length)], b"<?xml")
            with contextlib.suppress(OSError):
                # A reader takes memory for all of it when more than one piece has come.
                self.wfile.write(bytes(1 << 20))
            self.server.is_over.wait()
        elif fault is Fault.ENDLESS:
            self._answer(200, [("Transfer-Encoding", "chunked")], b"")
            with contextlib.suppress(OSError):
                while not self.server.is_over.is_set():
                    self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            self.close_connection = True
        elif fault is Fault.STALE and asked in self.server.answers:
            self._answer(*self.server.answers[asked])
        else:
            answer = self._ask(body)
            self.server.answers.setdefault(asked, answer)
            self._answer(*answer, is_cut=fault is Fault.CUT)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        asking = http.client.HTTPConnection(self.server.behind)
        with contextlib.closing(asking):
            asking.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                asking.putheader(name, value)
            asking.endheaders(body)
            answer = asking.getresponse()
            data = answer.read()
            hop = {"connection", "transfer-encoding", "content-length"}
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in hop]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            return answer.status, [*headers, ("Content-Length", length or "0")], data

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, is_cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers or [("Content-Length", str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        self.close_connection = is_cut

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def stand_before(endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(endpoint) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        try:
            yield proxy
        finally:
            proxy.is_over.set()
            proxy.shutdown()
            serving.join()
