"""A connection that speaks RESP, the language of Valkey and Redis.

It does what other clients do not: a large value is sent from where it lies, without a copy next to its command, and it
is read into memory that was used before.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload import native
from kvoffload.tiers.base import Addresses, RecordNames
from kvoffload.tiers.envelope import HEAD_BYTES, CameRecords
from kvoffload.tiers.record_store import StoreFaultError, Value, one_line

_LINE_BYTES = 64 << 10
_SHORTEST_LINE = 3
"""Bytes of a sign and the line's end."""
_FEW_BYTES = 32
"""Up to so many bytes are not waited for alone: that would take another call for those behind them."""
_SEND_PARTS = 512
"""The most pieces in one call of the kernel, which takes 1024."""
_SLOWEST = 1 << 20
"""Bytes a second; an answer has so much time more than one without bytes."""
_LONGEST_MS = (1 << 32) - 1
_VALUE_LIMIT = 512 << 20
"""The server's own limit of a value, in bytes."""
_ANSWER_LIMIT = 16 << 20
"""The most bytes of memory for an answer that is no record."""
_ELEMENT_BYTES = 64
"""Memory of a list's element besides its text, rounded up."""
_DEPTH = 8
_END = b"\r\n"
_NUMBER = re.compile(rb"[+-]?[0-9]{1,20}")
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True)
class ErrorAnswer:
    """An error that a server sends instead of an answer."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Answer = int | bytes | ErrorAnswer | list["Answer"] | None


def read_error(line: bytes) -> ErrorAnswer:
    """Reads the error of a line that begins with a minus."""
    return ErrorAnswer(one_line(line[1:].decode(errors="replace")))


def pack_command(*words: Value) -> bytes:
    """Packs a short command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts.append(b"$%d\r\n%b\r\n" % (len(word), bytes(word)))
    return b"".join(parts)


class RespConnection:
    """A connection for one thread, except for `interrupt`. After a StoreFaultError it is of no use any more."""

    def __init__(self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Connects. No answer may take longer than the timeout, and a large one not longer than a slow line needs."""
        self._timeout_s = timeout_s
        self.moves_records = tls is None
        """Whether the socket carries the records' bytes as they are, so that they are read without Python."""
        self._all = socket.MSG_WAITALL if tls is None else 0
        self._lines = bytearray(_LINE_BYTES)
        self._first = self._last = 0
        """The range of `_lines` that was read and not yet taken."""
        self._left = 0
        """Bytes of memory that the answer being read may still take."""
        self._began_s = 0.0
        """The time at which the reading of that answer began."""
        plain: socket.socket | None = None
        try:
            plain = socket.create_connection((host, port), timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
            if tls is None:
                # The kernel waits: for all of a value, and without a turn of this thread for each part of it.
                plain.settimeout(None)
                wait = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        except (OSError, ValueError, OverflowError) as fault:
            # In a cluster the other nodes supply the address, which may be no host and no port.
            if plain is not None:
                plain.close()
            raise StoreFaultError(_describe(fault, timeout_s)) from fault

    def send(self, parts: Sequence[Value]) -> None:
        """Sends commands, given in pieces of any size."""
        left = [memoryview(part) for part in parts if len(part)]
        end_s = self._allow(sum(map(len, left)))
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                for joined in _join_small(left):
                    self._socket.sendall(joined)
                    self._check(end_s)
                return
            at = 0
            while at < len(left):
                sent = self._socket.sendmsg(left[at : at + _SEND_PARTS])
                while at < len(left) and sent >= len(left[at]):
                    sent -= len(left[at])
                    at += 1
                if sent:
                    left[at] = left[at][sent:]
                if at < len(left):
                    self._check(end_s)
        except OSError as fault:
            raise StoreFaultError(_describe(fault, self._timeout_s)) from fault

    def ask(self, *words: Value) -> Answer:
        self.send([pack_command(*words)])
        return self.read_answer()

    def read_lines(self, count: int) -> list[bytes]:
        """Reads `count` answers of one line each, with the sign before them. All answers but values and lists are
        so."""
        end_s = self._allow(0)
        found: list[bytes] = []
        while True:
            cut = self._lines.rfind(_END, self._first, self._last)
            if cut >= 0:
                lines = bytes(self._lines[self._first : cut]).split(_END, count - len(found))
                taken = lines[: count - len(found)]
                self._first += sum(map(len, taken)) + 2 * len(taken)
                found += taken
            if len(found) == count:
                return found
            # As many bytes as they have at least: each time some of them came Python would have its turn.
            self._fill(end_s, at_least=_SHORTEST_LINE * (count - len(found) - 1))

    def read_size(self) -> int | ErrorAnswer | None:
        """Reads the size of a value; the caller reads the value next. None: there is no value."""
        line = self._read_line(self._allow(0))
        if line[:1] == b"-":
            return read_error(line)
        if line[:1] != b"$":
            raise StoreFaultError(f"it does not speak as it should: {line[:40]!r} where a value was due")
        size = _number(line)
        if size > _VALUE_LIMIT:
            raise StoreFaultError(f"it does not speak as it should: a value of {size} bytes")
        return None if size < 0 else size

    def read_into(self, *parts: memoryview) -> None:
        """Reads a value whose size was read, into the given parts."""
        end_s = self._allow(sum(map(len, parts)))
        for part in parts:
            self._read_into(part, end_s)
        self._read_end(end_s)

    def read_records(self, names: RecordNames, slots: Addresses, record_bytes: int) -> CameRecords:
        """Reads values that are heads and records to slots, up to the first answer that is no value of that length.
        They are read without a turn of Python for each. Only if `moves_records`."""
        allowed_s = self._timeout_s + (HEAD_BYTES + record_bytes) / _SLOWEST
        try:
            heads, digests, self._first, self._last = native.receive_resp_values(
                self._socket.fileno(),
                self._lines,
                self._first,
                self._last,
                slots.data,
                record_bytes,
                head_bytes=HEAD_BYTES,
                fingerprint=names.fingerprint,
                block_hashes=names.hashes,
                group=names.group,
                shard=names.shard,
                timeout_ms=min(int(allowed_s * 1000), _LONGEST_MS),
            )
        except OSError as fault:
            raise StoreFaultError(_describe(fault, self._timeout_s)) from fault
        return CameRecords(np.frombuffer(heads, np.uint8).reshape(-1, HEAD_BYTES), np.frombuffer(digests, np.uint64))

    def read_beginning(self, size: int, wanted: int) -> memoryview:
        """Reads the beginning of a value whose size was read; what follows is dropped."""
        end_s = self._allow(size)
        begin = memoryview(bytearray(min(size, wanted)))
        self._read_into(begin, end_s)
        rest = memoryview(bytearray(_LINE_BYTES))
        for at in range(len(begin), size, _LINE_BYTES):
            self._read_into(rest[: size - at], end_s)
        self._read_end(end_s)
        return begin

    def read_answer(self) -> Answer:
        """Reads any answer except a record. A list has no more time than one value of its size."""
        self._left, self._began_s = _ANSWER_LIMIT, time.monotonic()
        return self._read_any(0)

    def interrupt(self) -> None:
        """Interrupts the connection, from any thread: what is under way fails at once."""
        with contextlib.suppress(OSError):
            # Shuts the socket below TLS down, which has no state that two threads could get wrong.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    # ---- inside ----

    def _allow(self, size_bytes: int) -> float:
        return time.monotonic() + self._timeout_s + size_bytes / _SLOWEST

    def _check(self, end_s: float) -> None:
        if time.monotonic() > end_s:
            raise TimeoutError

    def _read_any(self, depth: int) -> Answer:
        line = self._read_line(self._due_s)
        self._take(_ELEMENT_BYTES + len(line))
        if line[:1] == b"$":
            size = _number(line)
            if size < 0:
                return None
            self._take(size)
            value = bytearray(size)
            self._read_into(memoryview(value), self._due_s)
            self._read_end(self._due_s)
            return bytes(value)
        if line[:1] == b":":
            return _number(line)
        if line[:1] == b"-":
            return read_error(line)
        if line[:1] == b"*" and depth < _DEPTH:
            count = _number(line)
            return None if count < 0 else [self._read_any(depth + 1) for _ in range(count)]
        if line[:1] != b"+":
            raise StoreFaultError(f"it does not speak as it should: {line[:40]!r}")
        return line[1:]

    def _take(self, size_bytes: int) -> None:
        self._left -= size_bytes
        if self._left < 0:
            raise StoreFaultError(f"it does not speak as it should: an answer of more than {_ANSWER_LIMIT} bytes")

    @property
    def _due_s(self) -> float:
        """The time by which the part of the answer that was counted so far must have come."""
        return self._began_s + self._timeout_s + (_ANSWER_LIMIT - self._left) / _SLOWEST

    def _read_line(self, end_s: float) -> bytes:
        while (cut := self._lines.find(_END, self._first, self._last)) < 0:
            self._fill(end_s)
        line = bytes(self._lines[self._first : cut])
        self._first += len(line) + 2
        return line

    def _fill(self, end_s: float, *, at_least: int = 1) -> None:
        """Receives at least one byte more. `at_least`: so many are sure to come, and nothing can be done before."""
        if self._first:
            self._lines[: self._last - self._first] = self._lines[self._first : self._last]
            self._last -= self._first
            self._first = 0
        if self._last == len(self._lines):
            raise StoreFaultError("it does not speak as it should: a line without an end")
        room = memoryview(self._lines)[self._last :]
        if self._all and at_least > _FEW_BYTES:
            self._last += self._receive(room[:at_least], end_s, self._all)
        else:
            self._last += self._receive(room, end_s)

    def _read_end(self, end_s: float) -> None:
        while self._last - self._first < len(_END):
            self._fill(end_s)
        self._first += len(_END)

    def _read_into(self, room: memoryview, end_s: float) -> None:
        at = min(self._last - self._first, len(room))
        room[:at] = memoryview(self._lines)[self._first : self._first + at]
        self._first += at
        while at < len(room):
            at += self._receive(room[at:], end_s, self._all)

    def _receive(self, room: memoryview, end_s: float, flags: int = 0) -> int:
        try:
            count = self._socket.recv_into(room, 0, flags)
            self._check(end_s)
        except OSError as fault:
            raise StoreFaultError(_describe(fault, self._timeout_s)) from fault
        if not count:
            raise StoreFaultError("it has hung up")
        return count


def read_count(text: bytes) -> int:
    """Reads a count, as a server writes it. StoreFaultError: it is no number, or below zero."""
    count = _parse(text)
    if count < 0:
        raise StoreFaultError(f"it does not speak as it should: {text[:40]!r} where a count was due")
    return count


def _number(line: bytes) -> int:
    return _parse(line[1:])


def _parse(text: bytes) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise StoreFaultError(f"it does not speak as it should: {text[:40]!r} where a number was due")
    return int(text)


def _describe(fault: Exception, timeout_s: float) -> str:
    if isinstance(fault, TimeoutError | BlockingIOError):
        return f"no answer within {timeout_s:g} s"
    return " ".join(str(fault).split()) or type(fault).__name__


def _join_small(parts: Sequence[memoryview]) -> list[Value]:
    """TLS makes a record of each piece that is sent."""
    joined: list[Value] = []
    small: list[memoryview] = []
    for part in parts:
        if len(part) < _LINE_BYTES:
            small.append(part)
            continue
        joined += [b"".join(small), part]
        small = []
    return [*joined, b"".join(small)]
