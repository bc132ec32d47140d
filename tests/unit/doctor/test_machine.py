"""Facts of this machine, and of limits that a child process was given."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from kvoffload.doctor.machine import NO_LIMIT, find_commit_room, look_at_machine

_LIMITED = """
import resource
from kvoffload.doctor.machine import look_at_machine
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
found = look_at_machine().limits
print(found["open files"], found["file size"])
"""


def test_this_machine_is_as_the_system_says() -> None:
    found = look_at_machine()
    assert found.kernel == tuple(int(word) for word in os.uname().release.split(".")[:2])
    assert 0 < found.headroom_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.available_bytes > 0
    assert found.limits["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert all(limit == NO_LIMIT or limit > 0 for limit in found.limits.values())
    assert "kvoffload" in found.plugins
    assert found.is_clock_kept in (True, False)


def test_limits_are_those_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", str(1 << 20)]


@pytest.mark.parametrize(
    ("overcommit", "memory", "room"),
    [
        (0, {"CommitLimit": 100, "Committed_AS": 40}, None),
        (1, {"CommitLimit": 100, "Committed_AS": 40}, None),
        (2, {"CommitLimit": 100, "Committed_AS": 40}, 60 << 10),
        (2, {"CommitLimit": 100, "Committed_AS": 140}, 0),
        (2, {}, None),
    ],
)
def test_promises_count_where_the_kernel_counts_them(overcommit: int, memory: dict[str, int], room: int | None) -> None:
    assert find_commit_room(memory, overcommit) == room
