"""A call of the kernel that fails in the engine's process costs it the cache for a while, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.children import child
from tests.kit.failing_calls import FOR_EVER, FailingCalls, needs_failing_calls
from tests.kit.server.tiers import serving

OF_A_JOIN = ("mmap", "socket", "dup")
"""The calls that a process makes when it joins a server."""
OF_A_LOOK = ("open", "socket", "pipe", "fork")
"""The calls that it makes when it looks for a private one."""
OF_AN_ACQUIRE = ("send", "receive", "wait")
"""The calls that it makes for an acquire, on its express channel."""
JOINS = """
import os, sys
from pathlib import Path
from kvoffload.client import Client, ClientSettings
from kvoffload.client.joining import Member
from kvoffload.protocol import Role
from tests.kit.server.blocks import register_of
def join():
    member = Member(engine="engine", role=Role.WORKER, pid=os.getpid())
    return Client(ClientSettings(socket=Path(sys.argv[1]), member=member, register=register_of()))
print("ready", flush=True)
for line in sys.stdin:
    client = join()
    print("made", flush=True)
    sys.stdin.readline()
    client.start()
    client.wait_until_served(0.5)
    print("tried", flush=True)
    sys.stdin.readline()
    print("served" if client.wait_until_served(60) else client.fault, flush=True)
    client.close()
"""
ACQUIRES = """
import os, sys, time
from pathlib import Path
from kvoffload.cache import Ask
from kvoffload.client import Client, ClientSettings
from kvoffload.client.joining import Member
from kvoffload.protocol import Role
from tests.kit.cache.cache_model import make_chain
from tests.kit.server.blocks import register_of
from tests.kit.web.vllm_blocks import PATIENT, save
member = Member(engine="engine", role=Role.WORKER, pid=os.getpid())
settings = ClientSettings(socket=Path(sys.argv[1]), member=member, register=register_of(), link=PATIENT)
with Client(settings) as client:
    assert client.wait_until_served(60), client.fault
    save(client, make_chain(1, 4))
    def acquire():
        found = client.acquire(Ask(make_chain(1, 4)))
        if found.is_hit:
            client.release(found.lease)
        return found.is_hit
    assert acquire()
    print("ready", flush=True)
    for line in sys.stdin:
        acquire()
        print("answered", flush=True)
        sys.stdin.readline()
        until_s = time.monotonic() + 60
        while not (is_hit := acquire()) and time.monotonic() < until_s:
            client.wait_until_served(1)
        print("hit" if is_hit else client.fault, flush=True)
"""
LOOKS = """
import os, sys
from pathlib import Path
os.environ.pop("LD_PRELOAD")  # only this process is short of anything
from kvoffload.client import private_server
from kvoffload.config.sources import Settings
from kvoffload.errors import PrivateServerError
private_server.LAUNCHER = Path(sys.argv[1]) / "none"
print("ready", flush=True)
for line in sys.stdin:
    try:
        private_server.find_or_start(Settings(memory="64MiB"), Path(sys.argv[1]))
    except PrivateServerError as fault:
        print("PrivateServerError", flush=True)
    except Exception as fault:
        print(repr(fault), flush=True)
"""


@contextmanager
def engine_of(script: str, folder: Path, calls: FailingCalls) -> Iterator[Callable[[], str]]:
    """Starts an engine's process. Each call of the result lets it go on, and returns what it says then."""
    with child(["-c", script, str(folder)], says="ready", env=calls.environment) as process:

        def go_on() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield go_on


@needs_failing_calls
@pytest.mark.parametrize("name", OF_A_JOIN)
def test_no_call_that_fails_keeps_a_client_from_joining_later(tmp_path: Path, name: str) -> None:
    calls, path = FailingCalls(tmp_path / "shared"), tmp_path / "s"
    with serving(path), engine_of(JOINS, path, calls) as go_on:

        def join(first: int) -> str:
            assert go_on() == "made"
            with calls.failing(name, first):
                assert go_on() == "tried"
            return go_on()

        assert join(FOR_EVER) == "served"
        assert calls.count(name)
        for first in range(calls.count(name)):
            assert join(first) == "served", first


@needs_failing_calls
@pytest.mark.parametrize("name", OF_A_LOOK)
def test_no_call_that_fails_is_more_than_no_private_server(tmp_path: Path, name: str) -> None:
    calls = FailingCalls(tmp_path / "shared")
    with engine_of(LOOKS, tmp_path, calls) as go_on:
        with calls.failing(name, FOR_EVER):
            assert go_on() == "PrivateServerError"
        assert calls.count(name)
        for first in range(calls.count(name)):
            with calls.failing(name, first):
                assert go_on() == "PrivateServerError", first


@needs_failing_calls
@pytest.mark.parametrize("name", OF_AN_ACQUIRE)
def test_no_call_that_fails_is_more_than_a_miss_of_one_acquire(tmp_path: Path, name: str) -> None:
    """Where the channel is lost by it, the client joins again."""
    calls, path = FailingCalls(tmp_path / "shared"), tmp_path / "s"
    with serving(path), engine_of(ACQUIRES, path, calls) as go_on:

        def acquire(first: int, last: int | None = None) -> str:
            with calls.failing(name, first, last):
                assert go_on() == "answered"
            return go_on()

        assert acquire(FOR_EVER) == "hit"
        # An answer that is there at once is not waited for.
        assert calls.count(name) or name == "wait"
        assert acquire(0, FOR_EVER) == "hit"
        assert calls.failed or name == "wait"
        # A busy machine makes it wait and receive many times.
        for first in range(min(calls.count(name), 4)):
            assert acquire(first) == "hit", first
