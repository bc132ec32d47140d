"""A file whose file system never answers: to look at it or to close it waits until the file system ends.

A process of its own serves the file system, so that a test that waits for it is answered in the end, and fails.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.children import child

ENDS_AFTER_S = 30

_MNT_DETACH = 2
_REQUEST = struct.Struct("<IIQQIIII")  # length, operation, number, node, uid, gid, pid, nothing
_ANSWER = struct.Struct("<IiQ")  # length, error, number
_STARTS, _OPENS = 26, 14
_STARTED = struct.pack("<IIIIHHI", 7, 31, 0, 0, 12, 10, 4096) + bytes(40)
_OPENED = struct.pack("<QII", 1, 0, 0)


class SilentFile:
    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self._path = path
        self._process = process

    def open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


@contextmanager
def silent_file(path: Path) -> Iterator[SilentFile]:
    """Mounts the file system at `path`, which needs root and /dev/fuse. It ends with the block or after
    ENDS_AFTER_S, and from then on every call for the file fails at once."""
    path.touch()
    with child(["-m", "tests.kit.silent_file", str(path)], says="serves") as process:
        try:
            yield SilentFile(path, process)
        finally:
            process.kill()
            process.wait()
            _c_library().umount2(bytes(path), _MNT_DETACH)


def _serve(path: str) -> None:
    kernel = os.open("/dev/fuse", os.O_RDWR)
    wishes = f"fd={kernel},rootmode=100000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    library = _c_library()
    if library.mount(b"silent", path.encode(), b"fuse", 0, wishes.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {path}")
    signal.alarm(ENDS_AFTER_S)
    print("serves", flush=True)
    while request := os.read(kernel, 1 << 20):
        _, operation, number, *_ = _REQUEST.unpack_from(request)
        answer = {_STARTS: _STARTED, _OPENS: _OPENED}.get(operation)
        if answer is not None:
            os.write(kernel, _ANSWER.pack(_ANSWER.size + len(answer), 0, number) + answer)


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
