"""Follows a CurveZMQ handshake by what the server says, which shows when the client's key was accepted."""

from __future__ import annotations

GREETING_BYTES = 64
MAX_BYTES = 4096
"""Bytes of a handshake. The server's own has a few hundred."""
_LONG, _COMMAND = 2, 4
_READY = b"\x05READY"


class CurveHandshake:
    """Reads the server's side of one connection: a greeting, `WELCOME`, and `READY` after the client has shown a key
    that is listed. See ZeroMQ's RFC 23 and 26."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = GREETING_BYTES
        self.is_ready = False
        """Whether the server has accepted the client's key."""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes that the server sends."""
        self._data += data[: MAX_BYTES - len(self._data)]
        while not self.is_ready and (frame := self._find_frame()) is not None:
            begin, end, flags = frame
            self.is_ready = bool(flags & _COMMAND) and self._data.startswith(_READY, begin, end)
            self._at = end

    def _find_frame(self) -> tuple[int, int, int] | None:
        """Returns where the next frame's body begins and ends, and its flags; None: it has not come completely."""
        if len(self._data) < self._at + 2:
            return None
        flags = self._data[self._at]
        begin = self._at + (9 if flags & _LONG else 2)
        end = begin + int.from_bytes(self._data[self._at + 1 : begin], "big")
        return None if len(self._data) < end else (begin, end, flags)
