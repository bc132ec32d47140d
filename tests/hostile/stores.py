"""Stores that lie: `python -m tests.hostile.stores valkey|s3 MODE SEED` prints its port and answers until it is killed.

Each store keeps the values that it is given. Some answer rightly at first. Later each answer is a lie with a chance of
one half; MODE says which kind. `all` draws a kind for each answer.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

RIGHT_S = (0.0, 1.0)
"""For so long after the first question the answers are right: one of these."""
SILENT_S, PIECE_S = 5.0, 0.05
KEPT_BYTES = 256 << 20
HUGE = 99_999_999_999
MODES = {
    "valkey": ("types", "lengths", "values", "silence", "garbage", "all"),
    "s3": ("lengths", "values", "silence", "garbage", "all"),
}


class Truth:
    """The values that a store was given, up to a bound, and whether its next answer is a lie. Any thread may use it."""

    def __init__(self, modes: tuple[str, ...], mode: str, seed: int) -> None:
        self._modes = [mode] if mode != "all" else [each for each in modes if each != "all"]
        self._chance = Random(seed)
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._right_s = self._chance.choice(RIGHT_S)
        self._first_s = 0.0

    def put(self, key: bytes, value: bytes) -> None:
        with self._lock:
            self._bytes += len(value) - len(self.values.pop(key, b""))
            self.values[key] = value
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self.values.popitem(last=False)[1])

    def draw_lie(self) -> str:
        """The kind of lie that the next answer is, and at once if it is silence. Empty: the answer is right."""
        with self._lock:
            self._first_s = self._first_s or time.monotonic()
            is_right = time.monotonic() < self._first_s + self._right_s or self._chance.random() < 0.5
            lie = "" if is_right else self._chance.choice(self._modes)
        time.sleep(SILENT_S if lie == "silence" else 0)
        return lie

    def spoil(self, value: bytes) -> bytes:
        """Another record's bytes, a part of the record, the record twice, or one bit that is wrong."""
        with self._lock:
            other = self._chance.choice([*self.values.values()][-64:] or [b"x"])
            at = self._chance.randrange(len(value) or 1)
            flipped = (
                value[:at] + bytes([value[at] ^ 1 << self._chance.randrange(8)]) + value[at + 1 :] if value else b""
            )
            return self._chance.choice([other, value[:at], value * 2, flipped])

    def draw_bytes(self) -> bytes:
        with self._lock:
            return self._chance.randbytes(self._chance.randrange(1, 4096))


class ValkeyLiar(StreamRequestHandler):
    """One connection, which speaks as much of RESP as the tier sends."""

    truth: Truth

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while head := self.rfile.readline(64):
                words = [self._read_word() for _ in range(int(head[1:]))]
                right = self._answer_rightly(words)
                match self.truth.draw_lie():
                    case "types":
                        right = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
                    case "lengths":
                        right = (b"$%d\r\nx\r\n" if len(words) % 2 else b"*%d\r\n") % HUGE
                    case "values" if words[0] == b"GET":
                        right = pack_bulk(self.truth.spoil(self.truth.values.get(words[1], b"")))
                    case "garbage":
                        right = self.truth.draw_bytes()
                self.wfile.write(right)

    def _read_word(self) -> bytes:
        size = int(self.rfile.readline(64)[1:])
        return self.rfile.read(size + 2)[:size]

    def _answer_rightly(self, words: list[bytes]) -> bytes:
        values = self.truth.values
        match words:
            case [b"SET", key, value, *options] if b"XX" not in options:
                self.truth.put(key, value)
            case [b"SET", *_]:
                return pack_bulk(None)
            case [b"GET", key]:
                return pack_bulk(values.get(key))
            case [b"GETRANGE", key, first, last]:
                return pack_bulk(values.get(key, b"")[int(first) : int(last) + 1])
            case [(b"EXISTS" | b"TOUCH" | b"EXPIRE" | b"UNLINK"), key, *_]:
                return b":%d\r\n" % (key in values)
            case [b"DBSIZE"]:
                return b":%d\r\n" % len(values)
            case [b"SCAN", *_]:
                return b"*2\r\n$1\r\n0\r\n*0\r\n"
            case [b"INFO", *_]:
                return pack_bulk(b"used_memory:1\r\nmaxmemory:1073741824\r\ncluster_enabled:0\r\n")
        return b"+OK\r\n"


def pack_bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


_EMPTY_LIST = (
    b'<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>'
)


class S3Liar(BaseHTTPRequestHandler):
    """One connection, which speaks as much of S3 as the tier needs: nothing is ever deleted or listed."""

    protocol_version = "HTTP/1.1"
    truth: Truth

    def do_PUT(self) -> None:
        self.truth.put(self._key(), self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self._answer(200, b"")

    def do_GET(self) -> None:
        if "list-type=" in self.path:
            self._answer(200, _EMPTY_LIST)
            return
        value = self.truth.values.get(self._key())
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if value is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif wanted is None:
            self._answer(200, value)
        else:
            first, last = int(wanted[1]), min(int(wanted[2]), len(value) - 1)
            self._answer(206, value[first : last + 1], f"bytes {first}-{last}/{len(value)}")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server asks for)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def _key(self) -> bytes:
        return urlsplit(self.path).path.encode()

    def _answer(self, status: int, data: bytes, came: str = "") -> None:
        lie = self.truth.draw_lie()
        if lie == "values" and status in (200, 206) and not data.startswith(b"<"):
            data = self.truth.spoil(data)
        if lie == "garbage":
            data = self.truth.draw_bytes()
        self.send_response_only(status)
        self.send_header("Content-Length", str(HUGE if lie == "lengths" else len(data)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"x"')
        if came:
            self.send_header("Content-Range", came)
        self.end_headers()
        with contextlib.suppress(OSError):
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]) if self.command != "HEAD" else ():
                self.wfile.write(piece)
                time.sleep(PIECE_S if lie == "lengths" else 0)


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


class _HttpServer(ThreadingHTTPServer):
    handle_error = _Server.handle_error


def main() -> None:
    kind, mode, seed = sys.argv[1:]
    ValkeyLiar.truth = S3Liar.truth = Truth(MODES[kind], mode, int(seed))
    server = _Server(("127.0.0.1", 0), ValkeyLiar) if kind == "valkey" else _HttpServer(("127.0.0.1", 0), S3Liar)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
