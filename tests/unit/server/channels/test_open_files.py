"""How many descriptors a server may have, and which are kept."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from kvoffload.server.channels.open_files import RESERVE, count_processes

SCRIPT = """
import os, resource, sys
from kvoffload.server.channels.open_files import count_allowed, is_of_reserve, raise_limit
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
assert count_allowed() == hard
count = 0
while not is_of_reserve(os.open("/dev/null", os.O_RDONLY)):
    count += 1
print(hard - len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize(("limit", "kept"), [(256, 32), (4096, RESERVE), (8192, RESERVE)])
def test_the_limit_is_raised_and_the_last_ones_are_kept(limit: int, kept: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(limit // 2), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The newest one is one of them already, as is that of the folder that is read.
    assert kept - 2 <= int(done.stdout) <= kept


@pytest.mark.parametrize(("limit", "processes"), [(256, 56), (1024, 224), (8192, 1920), (2, 1)])
def test_each_process_takes_four_of_them(monkeypatch: pytest.MonkeyPatch, limit: int, processes: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert count_processes() == processes
