"""An HTTP server whose answers are up to the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Asked(NamedTuple):
    """A request to the server."""

    method: str
    path: str
    headers: Message
    body: bytes


@contextmanager
def answering(answer: Callable[[Asked], tuple[int, bytes]]) -> Iterator[str]:
    """Serves on a port of its own, and gives its address. `answer` returns a status and a body; it is called on a
    thread for each connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._tell("GET")

        def do_POST(self) -> None:
            self._tell("POST")

        def _tell(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, data = answer(Asked(method, self.path, self.headers, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
