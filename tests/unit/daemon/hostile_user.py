"""A server in a process of its own, and what somebody who may open its socket does to it."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.daemon.zmtp import GREETING, pack_command
from kvoffload.protocol import Counts, Stats
from tests.children import child
from tests.unit.daemon.raw_client import RawClient
from tests.unit.daemon.test_server import hashes_of, register_of, save

TIMEOUT_S = 60.0
READY = pack_command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
SERVER = """
import resource, sys
from pathlib import Path
from kvoffload.cache import CacheTerms
from kvoffload.daemon.server import CacheServer, ServerPlan
files = int(sys.argv[2])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
memory = CacheTerms(memory_bytes=64 << 20, segment_bytes=64 << 20)
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": memory}))
print("serves", flush=True)
server.run()
"""


class Beset:
    """The server, and a client of it that must not notice."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.path, self.process = path, process
        self.honest = RawClient(path, register_of(), engine="honest")
        save(self.honest, hashes_of(3), 1)
        self._opened: list[socket.socket] = []

    def connect_control(self, said: bytes = b"") -> socket.socket:
        """A connection to the control channel, as it is. Nothing waits at it."""
        return self._connect(socket.SOCK_STREAM, self.path.with_name("s.control"), said)

    def connect_lifeline(self) -> socket.socket:
        return self._connect(socket.SOCK_SEQPACKET, self.path)

    def close(self) -> None:
        for one in self._opened:
            one.close()
        self.honest.close()

    def check(self) -> None:
        """It lives, and the honest client is served."""
        assert self.process.poll() is None
        answer = self.honest.ask(Stats())
        assert isinstance(answer, Counts), answer
        assert answer.readable == 3

    def wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < end
            self.check()

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def measure_rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        # Without memory that is shared: the pool's pages come when the pool grows.
        return (int(pages[1]) - int(pages[2])) * resource.getpagesize()

    def _connect(self, kind: int, path: Path, said: bytes = b"") -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, kind)
        self._opened.append(connected)
        connected.settimeout(TIMEOUT_S)
        connected.connect(str(path))
        if said:
            connected.sendall(said)
        connected.setblocking(False)
        return connected


@contextmanager
def beset(*, files: int = 0) -> Iterator[Beset]:
    """`files`: how many descriptors the server may have; 0: as many as we."""
    with (
        tempfile.TemporaryDirectory() as folder,
        child(["-c", SERVER, f"{folder}/s", str(files)], says="serves") as process,
    ):
        made = Beset(Path(folder) / "s", process)
        try:
            yield made
        finally:
            made.close()


def is_let_go(connected: socket.socket) -> bool:
    """Reads what has come, too."""
    try:
        while connected.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def say(connected: socket.socket, data: bytes) -> int:
    """As much as is taken; -1: it was let go."""
    sent = 0
    try:
        while sent < len(data):
            sent += connected.send(data[sent : sent + (1 << 16)])
    except BlockingIOError:
        pass
    except ConnectionError:
        return -1
    return sent


HELLO_GREETING = GREETING + READY
