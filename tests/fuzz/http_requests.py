"""Requests over HTTP: a head, and the JSON of a body."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.web.http_message import HEAD_END, HttpError, Request, fault_response, parse_head
from tests.fuzz.parts import check_line


def make_seeds() -> Iterator[bytes]:
    host = b"\r\nHost: localhost:8080\r\nAccept: text/plain"
    yield b"GET /metrics?a=1&b=%20 HTTP/1.1" + host + HEAD_END
    yield b"HEAD /%7Estats HTTP/1.0\r\nConnection:  keep-alive \t" + HEAD_END
    body = b'{"tenant": "a", "quota_bytes": 12, "more": [1.5, null, "\\u00e4"]}'
    sent = b"\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d" % len(body)
    yield b"POST /quota HTTP/1.1" + host + sent + HEAD_END + body


def run(data: bytes) -> None:
    head_bytes, _, body = data.partition(HEAD_END)
    try:
        head = parse_head(head_bytes)
        assert head.path.startswith("/")
        Request(head=head, body=body).read_json()
    except HttpError as fault:
        check_line(fault)
        fault_response(fault).pack(is_last=True, has_body=True)
