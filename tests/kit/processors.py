"""Threads that are bound to processors, and where a process's threads may run."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ALL_CPUS = os.sched_getaffinity(0)
needs_two_cpus = pytest.mark.skipif(len(ALL_CPUS) < 2, reason="needs two processors")


@contextmanager
def bound_to(cpus: set[int]) -> Iterator[None]:
    """Binds the calling thread, as OpenMP binds the main thread of vLLM's workers on CPUs."""
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ALL_CPUS)


_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_SCHEDULE = struct.Struct("<IIQiIQQQ")


def measure_turn_ns(thread: int) -> int:
    """Returns for how long a thread runs before the kernel lets another one have its processor; 0: the kernel does not
    tell, as before Linux 6.12."""
    schedule = ctypes.create_string_buffer(_SCHEDULE.size)
    number = _SCHED_GETATTR.get(os.uname().machine)
    if number is None or ctypes.CDLL(None).syscall(number, thread, schedule, _SCHEDULE.size, 0) != 0:
        return 0
    return int(_SCHEDULE.unpack(schedule.raw)[5])


needs_turns = pytest.mark.skipif(measure_turn_ns(0) == 0, reason="the kernel does not tell how long turns are")


def thread_cpus(prefix: str) -> dict[int, set[int]]:
    """Returns the processors that each thread of this process may use whose name begins so."""
    return {
        int(thread.name): os.sched_getaffinity(int(thread.name))
        for thread in Path("/proc/self/task").iterdir()
        if (thread / "comm").read_text().startswith(prefix)
    }
