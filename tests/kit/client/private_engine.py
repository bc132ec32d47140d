"""Engines of a private server as real processes, many in a short time: one that has imported everything forks them.

test ─ a line of JSON ─► nursery ─ forks ─► leader of a process group ─ forks ─► workers, each with its own client
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvoffload.client.private_server import find_or_start
from kvoffload.config.sources import Settings
from kvoffload.errors import PacketError
from tests.kit.server.blocks import acquire, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

ROOT = Path(__file__).parents[3]
ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A process that is served."""

    pid: int
    server: int
    socket: str
    memory: tuple[int, ...]
    """Inodes of the server's memory."""
    found: int
    """Tokens that were cached before."""


class Group:
    """An engine: a process group with its leader."""

    def __init__(self, leader: int, workers: tuple[Joined, ...], end: int) -> None:
        """Takes a descriptor whose end the workers wait for."""
        self.leader = leader
        self.workers = workers
        self._end = end

    def end(self) -> None:
        """Ends it in good order."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def kill(self) -> None:
        """Kills the processes of the group that are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.leader, signal.SIGKILL)
        self.end()


def join(room: Path, *, linger: str) -> tuple[RawClient, Path]:
    """Joins as every engine does: a process that is not welcomed looks for a server again."""
    settings = Settings(memory="64MiB", linger=linger)  # type: ignore[arg-type]
    for _ in range(ATTEMPTS):
        path = find_or_start(settings, room)
        try:
            return RawClient(path, register_of(), engine=f"engine {os.getpgrp()}"), path
        except (OSError, PacketError):
            continue
    raise AssertionError(f"{ATTEMPTS} servers did not welcome")


class Nursery:
    """May be used by several threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turn = threading.Lock()

    def start(self, room: Path, *, workers: int = 1, linger: str = "0s", delay_ms: int = 0) -> Group:
        """An engine whose workers are all served, that began so much later. The caller ends it."""
        said, say = os.pipe()
        ended, end = os.pipe()
        with self._turn:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            order = {"room": str(room), "workers": workers, "linger": linger}
            order |= {
                "delay_s": delay_ms / 1000,
                "say": f"/proc/{os.getpid()}/fd/{say}",
                "ended": f"/proc/{os.getpid()}/fd/{ended}",
            }
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            leader = int(self._process.stdout.readline())
        os.close(ended)
        os.close(say)
        with open(said) as lines:
            told = [json.loads(line) for line in lines]
        group = Group(leader, tuple(Joined(**{**one, "memory": tuple(one["memory"])}) for one in told), end)
        if len(told) != workers:
            group.kill()
            raise AssertionError(f"{len(told)} of {workers} workers are served")
        return group


@contextmanager
def nursery() -> Iterator[Nursery]:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import serve; serve()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Nursery(process)
        finally:
            process.kill()


def serve() -> None:
    """The nursery's own process."""
    for line in sys.stdin:
        order = json.loads(line)
        say, ended = os.open(order["say"], os.O_WRONLY), os.open(order["ended"], os.O_RDONLY)
        leader = os.fork()
        if leader == 0:
            _lead(order, say, ended)
        os.setpgid(leader, leader)
        os.close(say)
        os.close(ended)
        print(leader, flush=True)
        # Those that have ended.
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass


def _lead(order: dict[str, object], say: int, ended: int) -> None:
    try:
        os.setpgid(0, 0)
        # Tests that run in the background of a shell ignore the signal by default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for _ in range(int(str(order["workers"])) - 1):
            if os.fork() == 0:
                break
        select.select([], [], [], float(str(order["delay_s"])))
        _work(Path(str(order["room"])), str(order["linger"]), say, ended)
        os._exit(0)
    except BaseException:  # noqa: BLE001  (a process's last word)
        traceback.print_exc()
    finally:
        os._exit(1)


def _work(room: Path, linger: str, say: int, ended: int) -> None:
    client, path = join(room, linger=linger)
    assert client.held is not None
    assert client.joining.welcome is not None
    hashes = hashes_of(4)
    found = acquire(client, hashes).boundary
    if not found:
        save(client, hashes, 5)
    files = (client.held.lock, client.held.index, *client.held.segments)
    joined = {
        "pid": os.getpid(),
        "server": client.joining.welcome.pid,
        "socket": str(path),
        "memory": [os.fstat(file).st_ino for file in files],
        "found": found,
    }
    os.write(say, json.dumps(joined).encode() + b"\n")
    os.close(say)
    _await(ended)
    client.close()


def _await(ended: int) -> None:
    """Until its other end is closed, or a signal is handled.

    Python notes a signal and handles it between two of its own instructions: one that comes just before a read that
    waits would be noted, and wait with it. Noting also writes to a pipe, and that is waited for as well.
    """
    noted, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note)
    select.select([ended, noted], [], [])
