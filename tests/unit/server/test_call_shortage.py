"""A call of the kernel that fails, for want of memory or of descriptors, ends no server: whichever it is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from kvoffload.errors import KVOffloadError
from tests.kit.children import child
from tests.kit.failing_calls import FOR_EVER, FailingCalls, needs_failing_calls
from tests.kit.server import raw_client
from tests.kit.server.visits import be_served, joined

SERVER = """
import logging, sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from kvoffload.server.loop import CacheServer, ServerPlan
from tests.kit.server.blocks import MEMORY
logging.basicConfig(filename=sys.argv[1] + ".log")
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": MEMORY}))
print("serves", flush=True)
server.run()
"""
OF_A_VISIT = ("open", "accept", "socketpair", "pidfd_open", "epoll", "pthread_create")
"""The calls that a server makes during a visit."""
OF_A_START = ("mmap", "memfd_create", "ftruncate", "socket", "eventfd", "epoll")
"""The calls that a server makes when it starts. Files that it opens then are Python's own for the most part."""
TIMEOUT_S = 60.0
"""Seconds in which a server starts or ends, on any machine."""
PATIENCE_S = 2.0
"""Seconds after which a visitor gives up, whom a call that failed may have cost an answer."""

LASTING_VISITS = 3


def visit(path: Path, seed: int) -> None:
    with joined(path, "visitor") as client:
        be_served(client, seed)


@needs_failing_calls
@pytest.mark.parametrize("name", OF_A_VISIT)
def test_no_call_that_fails_ends_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each call of a visit fails in turn, and then all calls of several visits, which the log tells once. The next
    visitor is served as ever."""
    calls, path = FailingCalls(tmp_path / "shared"), tmp_path / "s"

    def visit_in_vain(seed: int) -> None:
        with monkeypatch.context() as patch, contextlib.suppress(AssertionError, KVOffloadError, OSError):
            patch.setattr(raw_client, "TIMEOUT_S", PATIENCE_S)
            visit(path, seed)

    with child(["-c", SERVER, str(path)], says="serves", env=calls.environment) as process:
        visit(path, 1)
        with calls.failing(name, FOR_EVER):
            visit(path, 2)
            tried = calls.count(name)
        assert tried
        for first in range(tried):
            with calls.failing(name, first):
                visit_in_vain(3 + first)
            visit(path, 1)
            assert process.poll() is None, first
        log = path.with_name("s.log")
        before = len(log.read_text().splitlines())
        with calls.failing(name, 0, FOR_EVER):
            for seed in range(LASTING_VISITS):
                visit_in_vain(100 + seed)
            assert calls.failed
        visit(path, 1)
        assert process.poll() is None
        said = log.read_text().splitlines()[before:]
        assert len(said) == len(set(said)), said


@needs_failing_calls
@pytest.mark.parametrize("name", OF_A_START)
def test_a_server_that_cannot_start_says_so_in_one_line(tmp_path: Path, name: str) -> None:
    """Each call of a start fails in turn. The server starts nevertheless, or ends with one line that gives a remedy."""
    calls = FailingCalls(tmp_path / "shared")
    command = [sys.executable, "-m", "kvoffload", "serve"]
    command += ["--set", f"server={tmp_path / 's'}", "--set", "memory=64MiB", "--set", "log_level=error"]

    def start(first: int) -> str:
        """Returns the line with which the server has ended. Empty: it has all of its memory, and is ended."""
        with (
            calls.failing(name, first),
            subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=calls.environment) as process,
        ):
            assert process.stdout is not None
            said = list[str]()
            for line in process.stdout:
                if line.startswith("ready: "):
                    process.terminate()
                    assert process.wait(TIMEOUT_S) == 0
                    return ""
                said += [line] * (not line.startswith("kvoffload serves "))
            assert process.wait(TIMEOUT_S) in (1, 2), said
            assert len(said) == 1, said
            return said[0]

    assert start(FOR_EVER) == ""
    tried = calls.count(name)
    assert tried
    lines = [line for first in range(tried) if (line := start(first))]
    assert lines
    assert all(line.startswith("kvoffload: ") and "; " in line for line in lines), lines
