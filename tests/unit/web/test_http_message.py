"""Requests as a table, and whatever else may come."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.web.http_message import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    HttpError,
    Request,
    Response,
    fault_response,
    json_response,
    parse_head,
)

HOST = b"\r\nHost: localhost"


def test_a_request_is_read() -> None:
    head = parse_head(b"GET /a%20b/c?x=1&y= HTTP/1.1\r\nHost: localhost:80\r\nAccept:  text/plain \r\naccept: */*")
    assert (head.method, head.path, head.query) == ("GET", "/a b/c", {"x": "1", "y": ""})
    assert head.headers == {"host": "localhost:80", "accept": "text/plain, */*"}
    assert (head.body_bytes, head.is_last) == (0, False)


@pytest.mark.parametrize(
    ("line", "connection", "is_last"),
    [
        (b"1", b"", False),
        (b"1", b"\r\nConnection: Close", True),
        (b"0", b"", True),
        (b"0", b"\r\nconnection: keep-alive", False),
    ],
)
def test_who_ends_the_connection(line: bytes, connection: bytes, is_last: bool) -> None:
    assert parse_head(b"GET / HTTP/1." + line + HOST + connection).is_last is is_last


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/2.0" + HOST, HTTPStatus.BAD_REQUEST),
        (b"get / HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET  / HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET http://a/ HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET /%ff HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET /%00 HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET /?a=1&a=2 HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET /?a=%ff HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\n folded", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\nname : value", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\na: b\nc: d", HTTPStatus.BAD_REQUEST),
        (b"POST / HTTP/1.1" + HOST + b"\r\nContent-Length: -1", HTTPStatus.BAD_REQUEST),
        (b"POST / HTTP/1.1" + HOST + b"\r\nContent-Length: 1, 1", HTTPStatus.BAD_REQUEST),
        (b"POST / HTTP/1.1" + HOST + b"\r\nContent-Length: 1\r\ncontent-length: 1", HTTPStatus.BAD_REQUEST),
        (b"POST / HTTP/1.1" + HOST + b"\r\nTransfer-Encoding: chunked", HTTPStatus.NOT_IMPLEMENTED),
        (b"GET / HTTP/1.1" + b"\r\na: b" * (MAX_HEADERS + 1), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    ],
)
def test_what_is_not_plainly_right_is_refused(data: bytes, status: HTTPStatus) -> None:
    with pytest.raises(HttpError) as fault:
        parse_head(data)
    assert fault.value.status is status
    assert "\n" not in str(fault.value)


def test_a_head_of_blanks_is_read_in_one_pass() -> None:
    """Matched by three neighbours that all take blanks, one header of 16 KiB kept the process busy for an hour."""
    blanks = b" \t" * (MAX_HEAD_BYTES // 2 - 100)
    assert parse_head(b"GET / HTTP/1.1" + HOST + b"\r\na:" + blanks + b"b c" + blanks).headers["a"] == "b c"
    with pytest.raises(HttpError, match="header field"):
        parse_head(b"GET / HTTP/1.1" + HOST + b"\r\na:" + blanks + b"\x01")


@given(
    st.binary(max_size=300) | st.builds(lambda rest: b"GET / HTTP/1.1" + HOST + b"\r\n" + rest, st.binary(max_size=300))
)
@example(b"GET /? HTTP/1.1" + HOST)
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data)
    except HttpError:
        return
    assert head.path.startswith("/")
    assert head.body_bytes >= 0


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        (b"application/json; charset=utf-8", b'{"a": 1}', None),
        (b"text/plain", b"{}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        (b"application/json", b"", HTTPStatus.BAD_REQUEST),
        (b"application/json", b"[1]", HTTPStatus.BAD_REQUEST),
        (b"application/json", b"\xff", HTTPStatus.BAD_REQUEST),
        (b"application/json", b"[" * 60_000, HTTPStatus.BAD_REQUEST),
    ],
)
def test_a_body_is_a_json_object_or_refused(content_type: bytes, body: bytes, status: HTTPStatus | None) -> None:
    head = parse_head(b"POST / HTTP/1.1" + HOST + b"\r\nContent-Type: " + content_type)
    request = Request(head=head, body=body)
    if status is None:
        assert request.read_json() == {"a": 1}
        return
    with pytest.raises(HttpError) as fault:
        request.read_json()
    assert fault.value.status is status


def test_answers_say_how_long_they_are() -> None:
    packed = Response(body=b"abc").pack(is_last=False, has_body=True)
    head, body = packed.split(b"\r\n\r\n")
    assert body == b"abc"
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 3" in head
    assert b"Connection: keep-alive" in head
    assert Response(body=b"abc").pack(is_last=True, has_body=False).endswith(b"Connection: close\r\n\r\n")
    refused = fault_response(HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "no", Allow="GET"))
    assert (refused.status, refused.body, refused.headers) == (405, b'{"error":"no"}\n', {"Allow": "GET"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_response(float("nan"))
