"""A real cgroup with a pool and a process that takes most of its memory: the kernel kills neither."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.units import MIB

LIMIT_MIB, POOL_MIB, HOG_MIB = 1024, 512, 616
"""The second process takes 60% of the cgroup's memory."""
MOUNTS = Path("/sys/fs/cgroup")


class Cgroup:
    """A memory cgroup of its own, of the version that the machine has."""

    def __init__(self) -> None:
        is_v1 = (MOUNTS / "memory" / "memory.limit_in_bytes").exists()
        self.folder = (MOUNTS / "memory" if is_v1 else MOUNTS) / f"kvoffload-test-{os.getpid()}"
        self.folder.mkdir()
        names = ("memory.limit_in_bytes", "memory.oom_control") if is_v1 else ("memory.max", "memory.events")
        self._limit, self._events = (self.folder / name for name in names)

    def limit(self, size_bytes: int) -> None:
        self._limit.write_text(str(size_bytes))

    @property
    def kills(self) -> int:
        lines = self._events.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def run(self, *words: str) -> subprocess.Popen[str]:
        """Runs a command of `pool_process` in the cgroup."""
        command = [sys.executable, "-m", "tests.kit.server.pool_process", *words, str(self.folder / "cgroup.procs")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    with contextlib.ExitStack() as opened:
        try:
            made = Cgroup()
            opened.callback(made.folder.rmdir)
            made.limit(LIMIT_MIB * MIB)
        except OSError as fault:
            pytest.skip(f"no memory cgroup can be made here: {fault}")
        yield made


def read_until(process: subprocess.Popen[str], is_wanted: Any) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if is_wanted(found := json.loads(line)):
            return dict(found)
    raise AssertionError(f"the pool's process has ended with {process.wait()}")


def end(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    return out


def test_a_pool_shrinks_for_a_process_that_takes_60_percent_and_grows_when_it_has_gone(cgroup: Cgroup) -> None:
    pool = cgroup.run("pool", str(POOL_MIB))
    read_until(pool, lambda found: found["ready"] == POOL_MIB * MIB)
    hog = cgroup.run("hog", str(HOG_MIB))
    assert hog.stdout is not None
    assert hog.stdout.readline() == "full\n"
    smaller = read_until(pool, lambda found: found["given_back"] > 0)
    assert smaller["ready"] < POOL_MIB * MIB
    assert smaller["reason"] == "cgroup"
    end(hog)
    read_until(pool, lambda found: found["ready"] == POOL_MIB * MIB and found["reason"] == "")
    last = json.loads(end(pool).splitlines()[-1])
    assert 0 < last["read"] < POOL_MIB // 4
    assert cgroup.kills == 0
