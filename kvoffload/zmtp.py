"""ZMTP 3.1 (RFC 37) without security, as a ROUTER and a DEALER speak it: bytes in, frames out.

Pure. ZeroMQ's own sockets have no bound in bytes, accept connections until the process has no descriptor left, and end
it then.
"""

from __future__ import annotations

import struct

from kvoffload.errors import PacketError

MAX_PARTS = 64
"""Number of parts of one message, and of commands between two messages."""

_SIGNATURE_BYTES = 10
_GREETING_BYTES = 64
_MECHANISM = b"NULL".ljust(20, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIZE = struct.Struct(">Q")
_LONGEST_SHORT = 255
_COMMAND_BYTES = 512
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_TTL_BYTES = 2

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + _MECHANISM + bytes(32)


class ZmtpReader:
    """Reads what one connection sends. It keeps the bytes until `take` returns them, and copies no frame twice."""

    def __init__(self, *, frame_bytes: int, kind: bytes = b"ROUTER") -> None:
        """`kind` is the type of this end's socket. The other end hears it when its greeting has come."""
        self.frame_bytes = frame_bytes
        """Size limit of a message in bytes, from the next one on. A longer one is refused when its head has arrived."""
        self._buffer = bytearray()
        self._reply = b""
        self._kind = kind
        self._has_greeted = False
        self._is_ready = False
        self._parts = 0

    def __len__(self) -> int:
        """Number of bytes that `take` has not returned yet."""
        return len(self._buffer)

    def feed(self, data: memoryview) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """Returns the next message; one of several parts has no bytes. None: it is not there yet.

        PacketError: the other end sent what it may not.
        """
        if not self._has_greeted and not self._take_greeting():
            return None
        for _ in range(MAX_PARTS):
            part = self._take_part()
            if part is None:
                return None
            flags, body = part
            if flags & _COMMAND:
                self._obey(body)
            elif not self._is_ready:
                raise PacketError("a message came before READY")
            elif flags & _MORE:
                self._parts += 1
            elif self._parts:
                self._parts = 0
                return b""
            else:
                return body
            if self._parts >= MAX_PARTS:
                break
        raise PacketError(f"{MAX_PARTS} parts make no message")

    def take_reply(self) -> bytes:
        """Returns the bytes to send to the other end in reply to what `take` has read."""
        reply, self._reply = self._reply, b""
        return reply

    def _take_greeting(self) -> bool:
        start = bytes(self._buffer[: _SIGNATURE_BYTES + 1])
        is_wrong = start[:1] not in (b"", b"\xff") or start[9:10] not in (b"", b"\x7f") or start[10:] in _OLD
        if is_wrong:
            raise PacketError("this is not ZMTP 3")
        if len(self._buffer) < _GREETING_BYTES:
            return False
        if self._buffer[12:32] != _MECHANISM:
            raise PacketError("there is no security here but NULL")
        del self._buffer[:_GREETING_BYTES]
        self._has_greeted = True
        self._reply = pack_command(_READY + _property(b"Socket-Type", self._kind) + _property(b"Identity", b""))
        return True

    def _take_part(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags = buffer[0]
        if flags & _LONG:
            if len(buffer) < 1 + _SIZE.size:
                return None
            (size,) = _SIZE.unpack_from(buffer, 1)
            start = 1 + _SIZE.size
        else:
            size, start = buffer[1], 2
        limit = _COMMAND_BYTES if flags & _COMMAND else self.frame_bytes
        if flags > _MORE | _LONG | _COMMAND or size > limit:
            raise PacketError(f"a frame has {size} bytes, allowed are {limit}")
        end = start + size
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            body = bytes(view[start:end])
        del buffer[:end]
        return flags, body

    def _obey(self, command: bytes) -> None:
        if command.startswith(_READY) and not self._is_ready:
            self._is_ready = True
        elif command.startswith(_PING):
            self._reply += pack_command(_PONG + command[len(_PING) + _TTL_BYTES :])


_OLD = (b"\x00", b"\x01", b"\x02")


def pack_head(size: int) -> bytes:
    """Packs the head of a message of one part."""
    return bytes((0, size)) if size <= _LONGEST_SHORT else bytes((_LONG,)) + _SIZE.pack(size)


def pack_command(body: bytes) -> bytes:
    if len(body) <= _LONGEST_SHORT:
        return bytes((_COMMAND, len(body))) + body
    return bytes((_COMMAND | _LONG,)) + _SIZE.pack(len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
