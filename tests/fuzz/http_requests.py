"""Requests over HTTP: a head, the JSON of a body, and what is asked of prompts in either."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.web.hint_envelope import MAX_ACTIONS, read_envelope
from kvoffload.web.http_message import HEAD_END, HttpError, Request, fault_response, parse_head
from kvoffload.web.prefix_question import MAX_PROMPTS, Question, read_body, read_query
from tests.fuzz.parts import check_line


def make_seeds() -> Iterator[bytes]:
    host = b"\r\nHost: localhost:8080\r\nAccept: text/plain"
    yield b"GET /metrics?a=1&b=%20 HTTP/1.1" + host + HEAD_END
    yield b"HEAD /%7Estats HTTP/1.0\r\nConnection:  keep-alive \t" + HEAD_END
    body = b'{"tenant": "a", "quota_bytes": 12, "more": [1.5, null, "\\u00e4"]}'
    sent = b"\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d" % len(body)
    yield b"POST /quota HTTP/1.1" + host + sent + HEAD_END + body
    yield b"GET /v1/prefix?hashes=0a0b,ff&identity=ab12&limit=32&wait_ms=5 HTTP/1.1" + host + HEAD_END
    yield b"GET /v1/prefix?tokens=1,2,77&salt=s&tenant=t&seed=0&model=m&alignment=16 HTTP/1.1" + host + HEAD_END
    body = b'{"prompts": [{"tokens": [1, 2, 70000]}, {"hashes": ["0a0b"], "limit": 9}], "seed": "0"}'
    sent = b"\r\nContent-Type: application/json\r\nContent-Length: %d" % len(body)
    yield b"POST /v1/prefix HTTP/1.1" + host + sent + HEAD_END + body
    body = b"""{"protocol_version": "1", "message_id": "m", "actions": [{"action_id": "a", "action_type": "retain",
    "action_version": "1", "payload": {"hashes": ["0a0b"], "tokens": 9, "session": "s", "ttl_s": 1.5, "priority": 2}},
    {"action_id": "b", "action_type": "move", "action_version": "1", "payload": {}}]}"""
    sent = b"\r\nContent-Type: application/json\r\nContent-Length: %d" % len(body)
    yield b"POST /v1/hints HTTP/1.1" + host + sent + HEAD_END + body


def run(data: bytes) -> None:
    head_bytes, _, body = data.partition(HEAD_END)
    try:
        head = parse_head(head_bytes)
        assert head.path.startswith("/")
        if "prefix" in head.path and not body:
            _check(read_query(head.query))
        given = Request(head=head, body=body).read_json()
        if "prefix" in head.path:
            _check(read_body(given))
        if "hints" in head.path:
            assert len(read_envelope(given).actions) <= MAX_ACTIONS
    except HttpError as fault:
        check_line(fault)
        fault_response(fault).pack(is_last=True, has_body=True)


def _check(question: Question) -> None:
    assert len(question.prompts) <= MAX_PROMPTS
    assert all(len(prompt.hashes) % 32 == 0 for prompt in question.prompts)
