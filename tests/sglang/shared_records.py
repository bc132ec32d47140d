"""The records of a shared cache server, as a test sees and damages them from outside."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvoffload.client import Client, ClientTerms, Member
from kvoffload.protocol import Role
from tests.vllm.cache_server import SharedServer

SEGMENT_BYTES = 64 << 20
LOOKS = 3000
LOOK_S = 0.02


class Observer:
    """Counts what a server has."""

    def __init__(self, server: SharedServer) -> None:
        member = Member(engine="test", role=Role.OBSERVER, rank=0, pid=os.getpid(), uid=os.getuid())
        self._client = Client(ClientTerms(socket=server.socket, member=member)).start()

    def await_pages(self, count: int) -> None:
        """Until so many pages can be read."""
        assert self._client.wait_until_served(LOOKS * LOOK_S), self._client.fault
        found = -1
        for _ in range(LOOKS):
            found = self._client.stats().readable
            if found >= count:
                return
            self._client.wait_until_served(LOOK_S)
            _pause()
        raise AssertionError(f"{found} of {count} pages were saved")

    def count(self) -> int:
        assert self._client.wait_until_served(LOOKS * LOOK_S), self._client.fault
        return self._client.stats().readable

    def close(self) -> None:
        self._client.close()


@contextmanager
def observed(server: SharedServer) -> Iterator[Observer]:
    observer = Observer(server)
    try:
        yield observer
    finally:
        observer.close()


@contextmanager
def zeroed(server: SharedServer) -> Iterator[None]:
    """Within it every record is zeros; afterwards it is what it was. The digests stay."""
    with ExitStack() as stack:
        segments = [stack.enter_context(segment) for segment in _open_segments(server.pid)]
        kept = [segment[:] for segment in segments]
        assert any(any(one[: 1 << 20]) for one in kept), "nothing was saved"
        for segment in segments:
            segment[:] = bytes(len(segment))
        try:
            yield
        finally:
            for segment, data in zip(segments, kept, strict=True):
                segment[:] = data


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


def _pause() -> None:
    import time

    time.sleep(LOOK_S)
