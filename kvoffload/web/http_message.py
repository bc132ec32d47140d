"""HTTP/1.1 as far as it is needed, and no further: whatever is not plainly right is refused with a status. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64
MAX_BODY_BYTES = 64 << 10
"""Limit of a body, unless the route allows more to a client with the token."""
HEAD_END = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]{0,4095}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}):([\x20-\x7e\x80-\xff\t]*)")
"""Blanks around a value are stripped afterwards: to have them matched takes the cube of their number."""
_LENGTH = re.compile(rb"[0-9]{1,10}")
_ONCE = ("host", "content-length", "authorization", "content-type")
"""Twice, they could mean two things."""


class HttpError(Exception):
    """A request that is answered by a status and one line."""

    def __init__(self, status: HTTPStatus, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    method: str
    path: str
    """Decoded; it begins with a slash."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers by their names in lower case."""
    body_bytes: int
    """Length of the body that follows."""
    is_last: bool
    """The connection ends with the answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    head: RequestHead
    body: bytes = b""

    def read_json(self) -> dict[str, Any]:
        """Reads a body that is a JSON object. HttpError: it is something else."""
        if self.head.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body has to be application/json")
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as fault:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the body is no JSON") from fault
        if not isinstance(found, dict):
            raise HttpError(HTTPStatus.BAD_REQUEST, "the body has to be a JSON object")
        return found


@dataclass(frozen=True, kw_only=True)
class Response:
    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def pack(self, *, is_last: bool, has_body: bool) -> bytes:
        """`has_body` is False for HEAD, whose answer tells what that of GET would have."""
        rows = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close" if is_last else "keep-alive",
            **self.headers,
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {rows[name]}" for name in rows)]
        return "\r\n".join(lines).encode("latin-1") + HEAD_END + (self.body if has_body else b"")


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return Response(status=status, body=body, content_type="application/json", headers=headers)


def fault_response(fault: HttpError) -> Response:
    return json_response({"error": str(fault)}, fault.status, **fault.headers)


def parse_head(data: bytes) -> RequestHead:
    """Reads all before the empty line. HttpError: it is no request."""
    line, *rest = data.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the first line is not METHOD /path HTTP/1.1")
    headers = _parse_headers(rest)
    minor = int(found[3])
    if minor and "host" not in headers:
        raise HttpError(HTTPStatus.BAD_REQUEST, "there is no Host")
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "a body needs a Content-Length here")
    path, _, query = found[2].decode("ascii").partition("?")
    connection = headers.get("connection", "").lower()
    return RequestHead(
        method=found[1].decode("ascii"),
        path=_decode(path),
        query=_parse_query(query),
        headers=headers,
        body_bytes=_parse_length(headers.get("content-length", "0")),
        is_last="close" in connection if minor else "keep-alive" not in connection,
    )


def _parse_headers(lines: list[bytes]) -> dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEADERS} header fields")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, "a header field is not `name: value`")
        name, value = found[1].decode("ascii").lower(), found[2].strip(b" \t").decode("latin-1")
        if name in headers and name in _ONCE:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"there is more than one {name}")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _parse_length(text: str) -> int:
    if _LENGTH.fullmatch(text.encode("latin-1")) is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "Content-Length is no number")
    return int(text)


def _decode(path: str) -> str:
    try:
        decoded = unquote_to_bytes(path).decode()
    except UnicodeDecodeError as fault:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the path is no UTF-8") from fault
    if any(not letter.isprintable() for letter in decoded):
        raise HttpError(HTTPStatus.BAD_REQUEST, "the path has letters that cannot be printed")
    return decoded


def _parse_query(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError as fault:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the query cannot be read") from fault
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HttpError(HTTPStatus.BAD_REQUEST, "a name is in the query more than once")
    return found
