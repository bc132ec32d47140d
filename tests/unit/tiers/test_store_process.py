"""A process that cannot be started, ends, or talks nonsense is a fault of the store, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvoffload.tiers import store_process
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.s3_client import LIBRARY
from kvoffload.tiers.store_process import StoreProcess

WAIT_S = 60.0
CODE = """
import json, os, signal, socket, sys
end = socket.socket(fileno=int(sys.argv[2]))
end.sendall(b'{"answer": "ready"}\\n')
for line in end.makefile("rb"):
    _, verb, *words = json.loads(line)
    if verb == "die":
        os.kill(os.getpid(), words[0])
    elif verb == "say":
        end.sendall(words[0].encode() + b"\\n")
    elif verb == "map":
        end.sendall(b'{"answer": 0}\\n')
    elif verb == "hang":
        signal.pause()
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that does as it is told."""
    start = subprocess.Popen

    def start_fake(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-c", CODE, *command[-3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start_fake)
    process = StoreProcess(LIBRARY, "the client")
    yield process
    process.close()


@pytest.mark.parametrize("call", ["memfd_create", "socketpair", "Popen"])
def test_one_that_cannot_be_started_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    for module in (os, socket, subprocess):
        if hasattr(module, call):
            monkeypatch.setattr(module, call, refuse)
    with pytest.raises(StoreFaultError, match="the client cannot be started: Too many open files"):
        StoreProcess(LIBRARY, "the client")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGABRT, "the client has ended: SIGABRT"), (signal.SIGKILL, "the client has ended")],
)
def test_how_it_has_ended_is_said(process: StoreProcess, number: int, said: str) -> None:
    with pytest.raises(StoreFaultError) as ended:
        process.ask(WAIT_S, "die", number)
    assert str(ended.value) == said


def test_one_that_hangs_has_so_much_time_and_no_more(process: StoreProcess) -> None:
    with pytest.raises(StoreFaultError, match=r"no answer within 0\.1 s"):
        process.ask(0.1, "hang")


@pytest.mark.parametrize("line", ["no JSON", '"text"', "{}", '{"other": 1}', "[" * 100_000])
def test_nonsense_is_a_fault(process: StoreProcess, line: str) -> None:
    with pytest.raises(StoreFaultError, match="the client does not answer as it should"):
        process.ask(WAIT_S, "say", line)


def test_an_answer_has_a_bounded_length(process: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "ANSWER_BYTES", 100)
    assert process.ask(WAIT_S, "say", json.dumps({"answer": "x" * 80})) == "x" * 80
    with pytest.raises(StoreFaultError, match="the client does not answer as it should"):
        process.ask(WAIT_S, "say", json.dumps({"answer": "x" * 100}))


def test_a_fault_is_told_in_one_line(process: StoreProcess) -> None:
    with pytest.raises(StoreFaultError) as told:
        process.ask(WAIT_S, "say", json.dumps({"fault": "no\nroom\x1b[2J"}))
    assert str(told.value) == "no room [2J"


def test_a_list_has_an_answer_for_each_item(process: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ask", lambda wait_s, verb, items: items[:2])
    assert process.ask_each(WAIT_S, "look", []) == []
    assert process.ask_each(WAIT_S, "look", ["a", "b"]) == ["a", "b"]
    with pytest.raises(StoreFaultError, match="the client does not answer as it should"):
        process.ask_each(WAIT_S, "look", ["a", "b", "c"])


def test_memory_that_grows_keeps_what_is_in_it(process: StoreProcess) -> None:
    first = process.take(WAIT_S, 100)
    first[:] = 7
    larger = process.take(WAIT_S, 5 << 20)
    assert larger[:100].tolist() == [7] * 100
    assert not larger[100:].any()
    larger[0] = 9
    assert first[0] == 9
