"""Bytes that a connection of the control channel sends, cut anywhere: ZMTP's greeting, commands and messages."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload import zmtp
from kvoffload.errors import PacketError
from tests.fuzz.parts import Input, check_line, pack_part

_FRAME_BYTES = 1000
_CLIENT = zmtp.GREETING
_READY = zmtp.pack_command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
_PING = zmtp.pack_command(b"\x04PING\x00\x0acontext")


def make_seeds() -> Iterator[bytes]:
    message = zmtp.pack_head(5) + b"hello"
    long = zmtp.pack_head(600) + bytes(600)
    for pieces in (
        [_CLIENT, _READY, message],
        [_CLIENT + _READY + message + long + _PING + message],
        [_CLIENT[:10], _CLIENT[10:40], _CLIENT[40:] + _READY[:3], _READY[3:] + b"\x01\x01a" * 3 + message],
    ):
        yield b"".join(map(pack_part, pieces))


def run(data: bytes) -> None:
    reader = zmtp.ZmtpReader(frame_bytes=_FRAME_BYTES)
    given = Input(data)
    fed = taken = 0
    try:
        while given:
            piece = given.part()
            fed += len(piece)
            reader.feed(memoryview(piece))
            while (message := reader.take()) is not None:
                taken += len(message)
                assert len(message) <= _FRAME_BYTES
            # No more is answered than was asked.
            assert len(reader.take_reply()) <= 2 * fed + 200
    except PacketError as fault:
        check_line(fault)
    assert taken + len(reader) <= fed
