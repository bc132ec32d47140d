"""Guests of a server's core."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvoffload.protocol import (
    CAPABILITIES,
    CODEC,
    Call,
    ClientMessage,
    Hello,
)
from kvoffload.server import Guest
from tests.kit.server.harness import Server

HELLO = Hello(protocol_min=1, protocol_max=1, capabilities=tuple(sorted(CAPABILITIES)))


_NUMBERS = count(1)


class Visitor:
    """A client over one TCP connection."""

    def __init__(self, server: Server, domain: str = "main", *, is_operator: bool = False) -> None:
        self.server = server
        self.guest = Guest(domain=domain, is_operator=is_operator)
        self.key = b"over tcp %d" % next(_NUMBERS)

    def ask(self, message: ClientMessage, *, session: int = 0, expires_ns: int = 0, number: int = 1) -> Any:
        frame = CODEC.encode_call(message, number=number, session=session, expires_ns=expires_ns)
        call = CODEC.decode_call(frame)
        assert isinstance(call, Call)
        sent = self.server.core.handle_guest(self.key, call, self.guest, self.server.now_ns)
        return self.server.deliver(sent, key=self.key)
