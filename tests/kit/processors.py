"""Threads that are bound to processors, and where a process's threads may run."""

from __future__ import annotations

import os
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


def thread_cpus(prefix: str) -> dict[int, set[int]]:
    """Returns the processors that each thread of this process may use whose name begins so."""
    return {
        int(thread.name): os.sched_getaffinity(int(thread.name))
        for thread in Path("/proc/self/task").iterdir()
        if (thread / "comm").read_text().startswith(prefix)
    }
