"""A server that can start no more threads refuses what needs one, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.children import child
from tests.kit.server.blocks import register_of
from tests.kit.server.raw_client import RawClient
from tests.kit.server.visits import be_served, joined

STARTS = 4
"""Threads that Python starts in a server: one that takes memory, one for long calls, and one by which a pool grows."""
AT_START = 3
"""Of them, those that are started before anything is served."""
FAILING = """
import sys, threading
from pathlib import Path
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.server.blocks import MEMORY
start, first, last = threading.Thread.start, int(sys.argv[2]), int(sys.argv[3])
starts = 0
def start_or_fail(thread):
    global starts
    starts += 1
    if first <= starts <= last:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = start_or_fail
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": MEMORY}))
print("serves", flush=True)
server.run()
"""
LIMITED = """
import logging, os, resource, sys
from pathlib import Path
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.server.blocks import MEMORY
user, threads, files = map(int, sys.argv[2:])
os.setgroups([])
os.setgid(user)
resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
os.setuid(user)
logging.basicConfig(filename=sys.argv[1] + ".log")
plan = ServerPlan(socket=Path(sys.argv[1]), memory={"": MEMORY}, mode=0o666, operator_uids=frozenset({0}))
server = CacheServer(plan)
print("serves", flush=True)
server.run()
"""
TAKER = """
import os, resource, sys, threading
user, threads = map(int, sys.argv[1:])
os.setgroups([])
os.setgid(user)
resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
os.setuid(user)
end = threading.Event()
try:
    for _ in range(threads):
        threading.Thread(target=end.wait, daemon=True).start()
except RuntimeError:
    print("has the others", flush=True)
sys.stdin.read()
"""
GREEDY = """
import os, sys
from pathlib import Path
from kvoffload.errors import PacketError
from tests.kit.server.blocks import register_of
from tests.kit.server.raw_client import RawClient
from tests.kit.server.visits import be_served, joined
user, most = int(sys.argv[2]), int(sys.argv[3])
os.setgroups([])
os.setgid(user)
os.setuid(user)
held = []
try:
    while len(held) < most:
        held.append(RawClient(Path(sys.argv[1]), register_of(), engine=f"greedy {len(held)}"))
except AssertionError as refused:
    assert "there are" in str(refused), refused
except PacketError:
    pass  # its lifeline was closed before it could greet
print(f"holds {len(held)}", flush=True)
sys.stdin.read()
"""
of_other_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
SERVER_USER, GREEDY_USER = 64_001, 64_002
"""Users that run nothing else: the kernel counts the threads of each user."""
THREADS = 64
FILES = 256
"""Descriptors, an eighth of which the server keeps for itself."""
HELD = THREADS // 2 * 3 // 4
"""One user's share of the channels, which have half of the threads."""


@pytest.mark.parametrize("first", range(AT_START + 1, STARTS + 2))
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_a_thread_that_cannot_be_started_ends_no_server(tmp_path: Path, first: int, is_lasting: bool) -> None:
    """The last number is that of a start that does not come: all were tried."""
    last = sys.maxsize if is_lasting else first
    with child(["-c", FAILING, str(tmp_path / "s"), str(first), str(last)], says="serves") as process:
        for seed, engine in enumerate(("first", "second"), 1):
            with joined(tmp_path / "s", engine) as client:
                be_served(client, seed)
        assert process.poll() is None


@pytest.mark.parametrize("first", range(1, AT_START + 1))
def test_a_server_without_its_own_threads_does_not_start_and_says_why(tmp_path: Path, first: int) -> None:
    command = [sys.executable, "-c", FAILING, str(tmp_path / "s"), str(first), str(first)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "ConfigError: a thread of the server cannot be started" in ended.stderr.splitlines()[-1]


@contextmanager
def limited(*, threads: int = THREADS, files: int = 4096) -> Iterator[Path]:
    """The socket of a server whose user may have so many threads and descriptors. It is alive at the end."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, SERVER_USER, SERVER_USER)
        Path(folder).chmod(0o755)
        path = Path(folder) / "s"
        limits = [str(SERVER_USER), str(threads), str(files)]
        with child(["-c", LIMITED, str(path), *limits], says="serves") as process:
            yield path
            assert process.poll() is None


@of_other_users
def test_no_user_takes_all_threads_that_the_server_may_have() -> None:
    with (
        limited() as path,
        child(["-c", GREEDY, str(path), str(GREEDY_USER), str(2 * THREADS)], says=f"holds {HELD}"),
        joined(path, "honest") as honest,
    ):
        be_served(honest, 1)


@of_other_users
def test_no_user_takes_all_descriptors_that_the_server_may_have() -> None:
    """Each process of an engine takes four of them."""
    held = FILES * 7 // 8 // 4 * 3 // 4
    with (
        limited(threads=4 * FILES, files=FILES) as path,
        child(["-c", GREEDY, str(path), str(GREEDY_USER), str(FILES)], says=f"holds {held}"),
        joined(path, "honest") as honest,
    ):
        be_served(honest, 1)


@of_other_users
def test_without_a_thread_for_its_channel_a_process_is_refused_and_others_are_served() -> None:
    """Other processes of the server's user have taken the threads that it could have had."""
    with limited() as path, joined(path, "first") as first:
        be_served(first, 1)
        with child(["-c", TAKER, str(SERVER_USER), str(THREADS)], says="has the others"):
            for engine in ("second", "third"):
                with pytest.raises(AssertionError, match="there are too many express channels"):
                    RawClient(path, register_of(), engine=engine)
                be_served(first, 2)
        with joined(path, "fourth") as fourth:
            be_served(fourth, 3)
        log = path.with_name("s.log").read_text()
        assert log.count("no thread can be started for an express channel") == 1
