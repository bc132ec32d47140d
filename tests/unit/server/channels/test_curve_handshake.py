"""A server's side of a handshake shows when it has accepted a key, in whatever pieces the bytes come."""

from __future__ import annotations

import pytest

from kvoffload.server.channels.curve_handshake import GREETING_BYTES, MAX_BYTES, CurveHandshake

GREETING = bytes(GREETING_BYTES)
WELCOME = b"\x04\xa8\x07WELCOME" + bytes(160)
READY = b"\x04\x56\x05READY" + bytes(80)
LONG_READY = b"\x06" + (306).to_bytes(8, "big") + b"\x05READY" + bytes(300)
ERROR = b"\x04\x0a\x05ERROR\x03400"


@pytest.mark.parametrize("ready", [READY, LONG_READY])
@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_a_key_is_accepted_with_ready(ready: bytes, size: int) -> None:
    said = GREETING + WELCOME + ready
    handshake = CurveHandshake()
    for at in range(0, len(said), size):
        assert not handshake.is_ready
        handshake.feed(said[at : at + size])
    assert handshake.is_ready


@pytest.mark.parametrize(
    "said",
    [
        b"",
        GREETING,
        GREETING + WELCOME,
        GREETING + WELCOME + ERROR,
        GREETING + WELCOME + READY[:-1],
        READY,
        GREETING + b"\x00" + READY[1:],
        GREETING + bytes(2 * MAX_BYTES) + READY,
    ],
)
def test_nothing_else_says_so(said: bytes) -> None:
    handshake = CurveHandshake()
    handshake.feed(said)
    assert not handshake.is_ready
