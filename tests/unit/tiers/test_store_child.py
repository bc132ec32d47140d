"""The process does as it is told, has so much memory and no more, and ends with the other end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers import mooncake, s3_client
from kvoffload.tiers.store_child import Library

MODULE = """
import atexit, time
from kvoffload.tiers.record_store import StoreFaultError
atexit.register(time.sleep, 3600)
kept = []

def fail(reason):
    raise StoreFaultError(reason)

def load(memory_fd):
    return {
        "add": lambda *words: sum(words),
        "fail": fail,
        "map": lambda size: 0,
        "fill": lambda size: len(kept.append(bytearray(size)) or kept),
    }
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from kvoffload.tiers.store_child import Library, main
main(Library(module="library", data_bytes=256 << 20, data_per_shared=2), int(sys.argv[2]), int(sys.argv[3]))
"""


class Asker:
    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._link = link
        self._answers = link.makefile("rb")
        self.process = process

    def read(self) -> Any:
        line = self._answers.readline()
        return json.loads(line) if line else None

    def ask(self, *words: Any) -> Any:
        self._link.sendall(json.dumps([60.0, *words]).encode() + b"\n")
        return self.read()

    def hang_up(self) -> None:
        self._answers.close()
        self._link.close()


@contextmanager
def running(folder: Path, module: str = MODULE) -> Iterator[Asker]:
    (folder / "library.py").write_text(module)
    link, end = socket.socketpair()
    memory = os.memfd_create("test")
    command = [sys.executable, "-c", RUN, str(folder), str(end.fileno()), str(memory)]
    with subprocess.Popen(command, pass_fds=(end.fileno(), memory), stderr=subprocess.DEVNULL) as process:
        end.close()
        asker = Asker(link, process)
        yield asker
        asker.hang_up()
        process.kill()
    os.close(memory)


def test_it_ends_with_the_other_end_whatever_its_library_would_still_do(tmp_path: Path) -> None:
    with running(tmp_path) as asker:
        assert asker.read() == {"answer": "ready"}
        assert asker.ask("add", 1, 2) == {"answer": 3}
        assert asker.ask("fail", "it is away") == {"fault": "it is away"}
        assert asker.ask("add", 3, 4) == {"answer": 7}
        asker.hang_up()
        assert asker.process.wait(60) == 0


def test_it_has_so_much_memory_and_more_with_what_is_shared(tmp_path: Path) -> None:
    with running(tmp_path) as asker:
        assert asker.read() == {"answer": "ready"}
        assert asker.ask("map", 200 << 20) == {"answer": 0}
        assert asker.ask("fill", 400 << 20) == {"answer": 1}
        assert asker.ask("fill", 400 << 20) is None
        assert asker.process.wait(60) != 0
    with running(tmp_path) as asker:
        assert asker.read() == {"answer": "ready"}
        assert asker.ask("fill", 400 << 20) is None


def test_without_the_library_it_says_so_and_ends(tmp_path: Path) -> None:
    with running(tmp_path, "raise ImportError('there is none')") as asker:
        assert asker.read() == {"fault": "there is none"}
        assert asker.process.wait(60) == 0


@pytest.mark.parametrize("library", [mooncake.LIBRARY, s3_client.LIBRARY], ids=["mooncake", "s3"])
def test_each_library_has_a_bound(library: Library) -> None:
    assert 0 < library.data_bytes <= 4 << 30
