"""Requests to the routes of the page."""

from __future__ import annotations

from kvoffload.web.http_message import Request, RequestHead

TOKEN = "of a test, and long enough"


def ask(method: str, path: str, *, body: bytes = b"", query: str = "", **headers: str) -> Request:
    head = RequestHead(
        method=method,
        path=path,
        query={query: "1"} if query else {},
        headers=headers,
        body_bytes=len(body),
        is_last=False,
    )
    return Request(head=head, body=body)
