"""A worker's thread is there before anything is submitted; without one there is no worker."""

from __future__ import annotations

import threading

import pytest

from kvoffload.errors import ConfigError
from kvoffload.server.common.worker_thread import start_worker
from tests.kit.scarce_threads import scarce_threads


def test_what_is_submitted_later_starts_no_thread() -> None:
    worker = start_worker("kvoffload-test")
    with scarce_threads():
        names = [worker.submit(lambda: threading.current_thread().name).result() for _ in range(3)]
    assert names == ["kvoffload-test_0"] * 3
    worker.shutdown()


def test_without_a_thread_the_fault_names_the_limits() -> None:
    with scarce_threads(), pytest.raises(ConfigError, match=r"can't start new thread; raise the limit of threads"):
        start_worker("kvoffload-test")
