"""One thread, jobs in order, ends with their faults; nothing here waits by the clock."""

from __future__ import annotations

import logging
import threading
import weakref

import pytest
import torch

from kvoffload.connector import copy_thread
from kvoffload.connector.copy_thread import CopyThread, Ended

PATIENCE_S = 60.0


def drain(thread: CopyThread, count: int) -> list[Ended]:
    ended: list[Ended] = []
    while len(ended) < count:
        ended += thread.take_ended(wait_s=PATIENCE_S)
    return ended


def fail() -> None:
    raise ValueError("disk on fire")


def test_jobs_run_one_after_the_other_as_submitted() -> None:
    thread, seen = CopyThread(), []
    thread.start()
    for number in range(50):
        thread.submit(number, lambda number=number: seen.append(number))  # type: ignore[misc]
    assert [ended.name for ended in drain(thread, 50)] == list(range(50))
    assert seen == list(range(50))
    assert thread.pending == 0
    thread.close()


def test_submitting_never_blocks_and_pending_counts_what_was_not_taken() -> None:
    thread, gate = CopyThread(), threading.Event()
    thread.start()
    thread.submit("slow", lambda: gate.wait(PATIENCE_S))  # type: ignore[arg-type, return-value]
    for number in range(1000):
        thread.submit(number, lambda: None)
    assert thread.take_ended() == []
    assert thread.pending == 1001
    gate.set()
    assert len(drain(thread, 1001)) == 1001
    assert thread.pending == 0
    thread.close()


def test_a_fault_ends_its_own_job_only() -> None:
    thread = CopyThread()
    thread.start()
    thread.submit("bad", fail)
    thread.submit("good", lambda: None)
    bad, good = drain(thread, 2)
    assert isinstance(bad.fault, ValueError)
    assert (bad.name, good) == ("bad", Ended("good", None))
    thread.close()


def test_a_fault_keeps_nothing_that_its_job_held() -> None:
    """Its frames hold views of engine memory, which may be freed before anybody asks how the job ended."""
    thread, refs, done = CopyThread(), [], threading.Event()

    def copy() -> None:
        memory = torch.zeros(8)
        refs.append(weakref.ref(memory))
        raise ValueError("device lost")

    thread.start()
    thread.submit("bad", copy)
    thread.submit("after", done.set)
    assert done.wait(PATIENCE_S)
    assert refs[0]() is None
    assert thread.pending == 2
    thread.close()


def test_without_jobs_nothing_is_waited_for() -> None:
    thread = CopyThread()
    thread.start()
    assert thread.take_ended(wait_s=PATIENCE_S) == []
    thread.close()


def test_closing_runs_what_was_submitted_and_its_ends_can_still_be_taken() -> None:
    thread, seen = CopyThread(), []
    for number in range(3):
        thread.submit(number, lambda number=number: seen.append(number))  # type: ignore[misc]
    thread.start()
    thread.close()
    assert seen == [0, 1, 2]
    assert [ended.name for ended in thread.take_ended()] == [0, 1, 2]
    thread.close()  # and again is fine


def test_started_again_it_runs_what_came_while_it_was_closed() -> None:
    thread, seen = CopyThread(), []
    thread.start()
    thread.close()
    thread.submit("between", lambda: seen.append(1))
    assert seen == []
    thread.start()
    drain(thread, 1)
    assert seen == [1]
    thread.close()


def test_a_copy_that_hangs_is_left_behind_within_the_bound_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copy_thread, "CLOSE_TIMEOUT_S", 0.0)
    thread, gate = CopyThread(), threading.Event()
    thread.start()
    thread.submit("hangs", lambda: gate.wait(PATIENCE_S))  # type: ignore[arg-type, return-value]
    thread.close()
    assert "did not end" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.ERROR
    gate.set()
    assert drain(thread, 1)[0].fault is None
