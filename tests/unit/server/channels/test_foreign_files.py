"""Users' jobs: each user's in their order, and no user waits for another's."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvoffload.errors import ConfigError
from kvoffload.server.channels import foreign_files
from kvoffload.server.channels.foreign_files import MAX_THREADS, REFUSED, ForeignFiles
from tests.kit.lingering import lingering

TIMEOUT_S = 60.0


@pytest.fixture
def files() -> Iterator[ForeignFiles]:
    with closing(ForeignFiles()) as made:
        yield made


def finish(files: ForeignFiles) -> None:
    assert select.select([files.fileno()], [], [], TIMEOUT_S)[0]
    files.finish()


def test_a_user_whose_file_cannot_be_closed_keeps_its_own_thread_and_no_other(files: ForeignFiles) -> None:
    told: list[object] = []
    with lingering() as held:
        held_file = os.dup(held.fileno())
        held.part()
        files.close_files(1, [held_file])
        files.do(1, lambda: "second of 1", count=2, then=told.append)
        for uid in range(2, 2 + MAX_THREADS):
            files.do(uid, lambda uid=uid: uid, then=told.append)  # type: ignore[misc]
        while len(told) < MAX_THREADS:
            finish(files)
        assert set(told) == set(range(2, 2 + MAX_THREADS))
        assert (files.count(1, "control"), files.count(2, "control"), files.total("control"), files.is_idle) == (
            3,
            0,
            3,
            False,
        )
        held.let_go()
        while told[-1] != "second of 1":
            finish(files)
    assert (files.total("control"), files.is_idle) == (0, True)


def test_a_few_results_are_told_at_once(files: ForeignFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "TOLD_AT_ONCE", 2)
    told: list[object] = []
    done = threading.Event()
    for number in range(4):
        files.do(1, lambda number=number: number, then=told.append)  # type: ignore[misc]
    files.do(1, done.set, then=told.append)
    assert done.wait(TIMEOUT_S)
    while not files.is_idle:
        time.sleep(0.001)
    for count in (2, 4, 5):
        finish(files)
        assert told == [0, 1, 2, 3, None][:count]
    assert select.select([files.fileno()], [], [], 0)[0] == []


def test_ends_of_one_kind_of_channel_take_no_places_of_another(files: ForeignFiles) -> None:
    """Descriptors that came in packets take places of every kind, and ends that were refused take none."""
    kinds = ("lifeline", "control", REFUSED)
    with lingering() as held:
        held_file = os.dup(held.fileno())
        held.part()
        files.close_files(1, [held_file])
        for kind in kinds:
            files.close_end(1, kind, socket.socket().close)
        assert [files.total(kind) for kind in kinds[:2]] == [2, 2]
        assert [files.count(1, kind) for kind in kinds[:2]] == [2, 2]
        held.let_go()
        while not files.is_idle:
            time.sleep(0.001)
    assert [files.total(kind) for kind in kinds] == [0, 0, 0]


def test_a_job_that_fails_has_no_result_and_ends_no_thread(files: ForeignFiles) -> None:
    told: list[object] = []

    def fail() -> None:
        raise OSError

    for act in (fail, lambda: 1):
        files.do(1, act, then=told.append)
    while len(told) < 2:
        finish(files)
    assert told == [None, 1]


def test_threads_that_cannot_be_started_are_tried_again(files: ForeignFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    until = threading.Event()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        files.do(1, lambda: until.wait(TIMEOUT_S))
        files.do(2, lambda: 2, then=told.append)
        with pytest.raises(ConfigError, match="cannot be started"):
            ForeignFiles()
    assert told == []
    files.start_threads()
    finish(files)
    assert told == [2]
    until.set()
