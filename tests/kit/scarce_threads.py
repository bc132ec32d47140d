"""Threads that cannot be started, as where a limit of the machine is reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def scarce_threads(*, spare: int = 0) -> Iterator[None]:
    """Python can start so many more threads meanwhile, in this process."""
    start, started = threading.Thread.start, 0

    def start_or_fail(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > spare:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        yield
