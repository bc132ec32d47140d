"""Which processors an engine may use, and how many of them at once: affinities, and what cgroups allow.

OpenMP binds the thread that loads it to a single processor, and vLLM's workers on CPUs spin there even when the engine
is idle. Threads and processes inherit the binding of the thread that starts them, so kvoffload gives those that it
starts the processors of the whole engine again.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
from collections.abc import Iterator, Set
from pathlib import Path

from kvoffload.cgroups import read_limits


def count_cpus(root: Path = Path("/")) -> int:
    """Returns how many processors this process may use, at least 1. Limits that cannot be read do not count. `root`:
    where `proc` and `sys` are."""
    allowed = float(len(os.sched_getaffinity(0)))
    for share in _cgroup_shares(root):
        allowed = min(allowed, share)
    return max(math.ceil(allowed), 1)


def engine_cpus() -> Set[int]:
    """Returns the processors that at least one thread of this process may use, or the process that spawned it: an
    engine may bind all threads of a worker, but not its own."""
    found = os.sched_getaffinity(0)
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threads.append(parent.pid)
    for thread in threads:
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            found |= os.sched_getaffinity(thread)
    return found


@contextlib.contextmanager
def running_on(cpus: Set[int]) -> Iterator[None]:
    """Lets threads and processes that the calling thread starts in this context use these processors. Restores the
    thread's own binding afterwards."""
    before = os.sched_getaffinity(0)
    # A processor may have been taken from us meanwhile: then what is started inherits the binding as it is.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _cgroup_shares(root: Path) -> Iterator[float]:
    """Yields how many processors each cgroup with a limit allows: the process's own, and all above it."""
    divided = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for words in read_limits("cpu", unified="cpu.max", divided=divided, root=root):
        # "max", or -1, is no bound.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            yield int(words[0]) / int(words[1])
