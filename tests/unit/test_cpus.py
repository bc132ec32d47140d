"""Processors that may be used: affinity and the quotas of cgroups, the least of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.cpus import count_cpus

UNIFIED = "0::/pod/engine\n"
DIVIDED = "4:memory:/pod\n3:cpu,cpuacct:/pod\n1:name=systemd:/pod\n0::/\n"


@pytest.fixture(autouse=True)
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


def test_a_machine_that_says_nothing_has_what_affinity_says(tmp_path: Path) -> None:
    assert count_cpus(tmp_path) == 16
