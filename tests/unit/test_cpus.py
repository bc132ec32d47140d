"""Processors that may be used: affinity and the quotas of cgroups, the least of them; and those of a whole engine."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.cpus import count_cpus, engine_cpus, running_on
from tests.kit.processors import ALL_CPUS, bound_to, needs_two_cpus

UNIFIED = "0::/pod/engine\n"
DIVIDED = "4:memory:/pod\n3:cpu,cpuacct:/pod\n1:name=systemd:/pod\n0::/\n"


@pytest.fixture
def _sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def make_root(folder: Path, cgroup: str, **files: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.usefixtures("_sixteen")
@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 16),
        ({"pod__engine__cpu_max": "max 100000\n"}, 16),
        ({"pod__engine__cpu_max": "400000 100000\n"}, 4),
        ({"pod__engine__cpu_max": "250000 100000\n"}, 3),
        ({"pod__engine__cpu_max": "50000 100000\n"}, 1),
        ({"pod__engine__cpu_max": "3200000 100000\n"}, 16),
        ({"pod__engine__cpu_max": "max 100000\n", "pod__cpu_max": "600000 100000\n"}, 6),
        ({"cpu_max": "200000 100000\n"}, 2),
        ({"pod__engine__cpu_max": "nonsense\n"}, 16),
        ({"pod__engine__cpu_max": "0 0\n"}, 16),
    ],
)
def test_a_quota_of_this_cgroup_or_of_one_above_it_counts(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert count_cpus(make_root(tmp_path, UNIFIED, **files)) == count


@pytest.mark.usefixtures("_sixteen")
@pytest.mark.parametrize(("quota", "count"), [("-1", 16), ("300000", 3), ("30000", 1)])
def test_the_older_kind_of_cgroup_has_a_file_for_each_figure(tmp_path: Path, quota: str, count: int) -> None:
    root = make_root(tmp_path, DIVIDED)
    folder = root / "sys/fs/cgroup/cpu,cpuacct/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert count_cpus(root) == count


def test_affinity_bounds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert count_cpus(make_root(tmp_path, UNIFIED, pod__engine__cpu_max="400000 100000")) == 2


@pytest.mark.usefixtures("_sixteen")
def test_a_machine_that_says_nothing_has_what_affinity_says(tmp_path: Path) -> None:
    assert count_cpus(tmp_path) == 16


def run_in_thread(act: Callable[[], object]) -> object:
    """Returns the result of `act` in a new thread."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    thread.start()
    thread.join()
    return answers[0]


def _tell_cpus(bound: int, pipe: multiprocessing.connection.Connection) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {bound})
    pipe.send(engine_cpus())


@needs_two_cpus
def test_an_engine_has_the_processors_of_all_its_threads() -> None:
    """OpenMP binds the thread that loads it: it alone says nothing of the process."""
    assert run_in_thread(lambda: (os.sched_setaffinity(0, {min(ALL_CPUS)}), engine_cpus())[1]) == ALL_CPUS


@needs_two_cpus
def test_a_worker_whose_threads_are_all_bound_has_those_of_the_process_that_spawned_it() -> None:
    """vLLM binds every rank on CPUs to processors of its own, and its engine core to none."""
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=_tell_cpus, args=(min(ALL_CPUS), theirs))
    worker.start()
    assert ours.recv() == ALL_CPUS
    worker.join()


@needs_two_cpus
def test_what_a_bound_thread_starts_may_run_on_the_given_processors_and_the_thread_stays_bound() -> None:
    bound = {min(ALL_CPUS)}
    with bound_to(bound):
        assert run_in_thread(lambda: os.sched_getaffinity(0)) == bound
        with running_on(ALL_CPUS):
            assert run_in_thread(lambda: os.sched_getaffinity(0)) == ALL_CPUS
        assert os.sched_getaffinity(0) == bound


def test_processors_that_are_not_there_leave_everything_as_it_is() -> None:
    with running_on({max(ALL_CPUS) + 4096}):
        assert run_in_thread(lambda: os.sched_getaffinity(0)) == ALL_CPUS
