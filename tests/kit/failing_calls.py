"""Calls of the kernel that fail in another process when a test says so, as under a limit of the machine."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "build" / "native" / "tests" / "libfailing_calls.so"
ERRORS = {
    "mmap": errno.ENOMEM,
    "memfd_create": errno.ENFILE,
    "ftruncate": errno.ENOSPC,
    "open": errno.EMFILE,
    "accept": errno.ENFILE,
    "socket": errno.EMFILE,
    "socketpair": errno.EMFILE,
    "eventfd": errno.EMFILE,
    "pidfd_open": errno.EMFILE,
    "dup": errno.EMFILE,
    "pipe": errno.EMFILE,
    "epoll": errno.ENOMEM,
    "pthread_create": errno.EAGAIN,
    "fork": errno.EAGAIN,
    "send": errno.ENOBUFS,
    "receive": errno.ENOMEM,
    "wait": errno.ENOMEM,
}
"""The calls, in the order of the library that makes them fail, each with an error that it may end with."""
NAMES = tuple(ERRORS)
FOR_EVER = 1 << 40

needs_failing_calls = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the library that makes calls fail is not built: make test-driver"
)
_NAME, _FIRST, _LAST, _ERROR, _FAILED, _COUNTS = range(6)
_NUMBER = struct.Struct("q")


class FailingCalls:
    """Makes calls fail in the processes that are started with `environment`. Used as a context."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_NUMBER.size * (_COUNTS + len(NAMES))))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 0)
        self._set(_NAME, -1)
        self.environment = {**os.environ, "LD_PRELOAD": str(LIBRARY), "KVOFFLOAD_TESTS_FAILING_CALLS": str(file)}

    @property
    def failed(self) -> int:
        """How many calls have failed in the last `failing`."""
        return self._get(_FAILED)

    def count(self, name: str) -> int:
        """Returns how many calls of this name there were since the last `failing` of it began."""
        return self._get(_COUNTS + NAMES.index(name))

    @contextmanager
    def failing(self, name: str, first: int = 0, last: int | None = None) -> Iterator[None]:
        """Meanwhile the calls of this name fail from the one with this number on, counted from now, up to `last`, which
        is `first` if not given."""
        number = NAMES.index(name)
        self._set(_FAILED, 0)
        self._set(_FIRST, first)
        self._set(_LAST, first if last is None else last)
        self._set(_ERROR, ERRORS[name])
        self._set(_COUNTS + number, 0)
        self._set(_NAME, number)
        try:
            yield
        finally:
            self._set(_NAME, -1)

    def _get(self, at: int) -> int:
        return int(_NUMBER.unpack_from(self._shared, _NUMBER.size * at)[0])

    def _set(self, at: int, value: int) -> None:
        _NUMBER.pack_into(self._shared, _NUMBER.size * at, value)
