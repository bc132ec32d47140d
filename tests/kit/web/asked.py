"""Requests to the routes of the page, and the page's own calls to a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.client import Client, ClientSettings, Member
from kvoffload.protocol import Role
from kvoffload.web.http_message import Request, RequestHead
from kvoffload.web.server_calls import ServerCalls

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


@contextmanager
def calls_to(path: Path, *, is_served: bool = True) -> Iterator[ServerCalls]:
    """Calls to the server at this path, which has joined them already if it is there."""
    with Client(ClientSettings(socket=path, member=Member(engine="web", role=Role.OBSERVER))) as client:
        assert not is_served or client.wait_until_served(30)
        yield ServerCalls(client)
