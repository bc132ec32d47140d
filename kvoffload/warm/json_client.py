"""JSON over HTTP, for one process's few questions: bounded in time, in bytes and in attempts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvoffload.errors import ConfigError, ServerError

MAX_ANSWER_BYTES = 32 << 20
ATTEMPTS = 3
FIRST_WAIT_S = 1.0
"""Before the second attempt; twice as long before each further one."""
_BUSY = frozenset({429, 502, 503, 504})
_SHOWN = 200
_PIECE_BYTES = 1 << 20


class AnswerError(Exception):
    """There was no answer, or one that is none: a line that says what."""


class JsonClient:
    """Asks one address; from any thread."""

    def __init__(
        self,
        address: str,
        *,
        key: str = "",
        timeout_s: float = 30.0,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` goes along as a bearer's. ConfigError: this is no address, or no key."""
        if not (key.isascii() and key.isprintable()):
            # Without the key: the line is printed.
            raise ConfigError("the key is not one line of printable ASCII", remedy="give a file with the key alone")
        parts = _split(address)
        if parts is None:
            raise ConfigError(f"{address!r} is no address", remedy="give one such as http://127.0.0.1:8000")
        assert parts.hostname is not None
        self._open = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._base = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s
        self._wait = wait
        self._clock = clock

    def get(self, path: str) -> Any:
        """AnswerError."""
        return self._ask("GET", path, None)

    def post(self, path: str, what: Mapping[str, Any]) -> Any:
        """AnswerError."""
        return self._ask("POST", path, json.dumps(what).encode())

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Sends a request once, and returns the status and what was answered, whatever form it has. AnswerError: no
        answer."""
        try:
            return self._exchange(method, path, body)
        except (OSError, HTTPException) as fault:
            raise self._tell(path, fault) from None

    def _tell(self, path: str, fault: Exception) -> AnswerError:
        return AnswerError(f"{self._host} does not answer {path}: {fault or type(fault).__name__}")

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        """Sends a request, and sends it again to a server that is busy or does not answer."""
        wait_s = FIRST_WAIT_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                status, data = self._exchange(method, path, body)
                if status not in _BUSY or attempt == ATTEMPTS:
                    return read_answer(path, status, data)
            except (OSError, HTTPException) as fault:
                if attempt == ATTEMPTS:
                    raise self._tell(path, fault) from None
            self._wait(wait_s)
            wait_s *= 2
        raise AssertionError("the last attempt has an end")

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = self._open(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
            connection.request(method, self._base + path, body, headers)
            answer = connection.getresponse()
            end_s = self._clock() + self._timeout_s
            data = bytearray()
            # A server that sends a byte now and then is never late for the socket's own timeout.
            while piece := answer.read1(_PIECE_BYTES):
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise HTTPException(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
                if self._clock() > end_s:
                    raise TimeoutError("timed out")
            return answer.status, bytes(data)
        finally:
            connection.close()


def _split(address: str) -> SplitResult | None:
    """Splits an address. None: it is not the address of an HTTP server."""
    try:
        parts = urlsplit(address)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # A connection turns the name into such, and raises what is no OSError.
        (parts.hostname or "").encode("idna")
    except ValueError:
        return None
    is_good = is_good and parts.path.isascii() and parts.path.isprintable() and " " not in parts.path
    return parts if is_good and not (parts.query or parts.fragment or parts.username) else None


def read_answer(path: str, status: int, data: bytes) -> Any:
    """AnswerError: it is a refusal, or no JSON."""
    if not 200 <= status < 300:
        raise AnswerError(f"{path} answers {status}: {_show(data)}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise AnswerError(f"{path} answers no JSON: {_show(data)}") from None


def _show(data: bytes) -> str:
    text = " ".join(data[: 4 * _SHOWN].decode(errors="replace").split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown[:_SHOWN] or "nothing"


def find_model(engine: JsonClient) -> tuple[str, str]:
    """The engine's first model, by the name that it serves and by the one that it loaded. ServerError: it does not
    say."""
    try:
        first = engine.get("/v1/models")["data"][0]
        return str(first["id"]), str(first.get("root") or "")
    except AnswerError as fault:
        raise ServerError(f"engine: {fault}", remedy="start it first, or give another address") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerError("engine: /v1/models names no model", remedy="give an OpenAI-compatible engine") from None
