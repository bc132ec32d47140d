"""The records of a shared cache server, as a test sees and damages them from outside."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.client import Client, ClientSettings, Member
from kvoffload.errors import ServerError
from kvoffload.protocol import Role
from tests.vllm.cache_server import SharedServer

SEGMENT_BYTES = 64 << 20
LOOKS = 3000
LOOK_S = 0.02


class Observer:
    """Counts what a server has."""

    def __init__(self, server: SharedServer) -> None:
        member = Member(engine="test", role=Role.OBSERVER, rank=0, pid=os.getpid(), uid=os.getuid())
        self.client = Client(ClientSettings(socket=server.socket, member=member)).start()

    def await_pages(self, count: int) -> None:
        """Waits until so many pages can be read."""
        self.await_that(lambda: self.client.stats().readable >= count, f"{count} pages were not saved")

    def await_that(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Waits until `is_so()`."""
        gate = threading.Event()
        for _ in range(LOOKS):
            # A server that takes over another's memory has nothing to tell at first, and a busy one is late.
            with contextlib.suppress(ServerError):
                if is_so():
                    return
            gate.wait(LOOK_S)
        raise AssertionError(otherwise)

    def count(self) -> int:
        self.await_pages(0)
        return self.client.stats().readable

    def await_no_leases(self) -> None:
        """Waits until no request holds a record that was promised to it."""
        self.await_that(lambda: not self.client.stats().leases, "leases are held")

    def close(self) -> None:
        self.client.close()


@contextmanager
def observed(server: SharedServer) -> Iterator[Observer]:
    observer = Observer(server)
    try:
        yield observer
    finally:
        observer.close()


@contextmanager
def zeroed(server: SharedServer) -> Iterator[None]:
    """Within it every record is zeros; afterwards it is what it was. Nothing is saved meanwhile."""
    kept = zero_records(server)
    try:
        yield
    finally:
        for segment, data in zip(_open_segments(server.pid), kept, strict=True):
            segment[:] = data
            segment.close()


def zero_records(server: SharedServer) -> list[bytes]:
    """Overwrites every record; the digests stay. Returns what was there."""
    kept = []
    for segment in _open_segments(server.pid):
        kept.append(segment[:])
        segment[:] = bytes(len(segment))
        segment.close()
    assert any(any(one[: 1 << 20]) for one in kept), "nothing was saved"
    return kept


def _open_segments(pid: int) -> Iterator[mmap.mmap]:
    """Shared memory without a name in any folder: the server's process has it open."""
    seen = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status = file.stat()
            is_segment = "memfd" in os.readlink(file) and status.st_size == SEGMENT_BYTES
        except OSError:
            continue
        if is_segment and status.st_ino not in seen:
            seen.add(status.st_ino)
            with file.open("r+b") as opened:
                yield mmap.mmap(opened.fileno(), SEGMENT_BYTES)
