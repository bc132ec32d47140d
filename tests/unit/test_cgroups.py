"""Limits of this process's cgroup and of those above it, in both kinds of hierarchy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.cgroups import read_limits

UNIFIED = "0::/pod/engine\n"
DIVIDED = "4:memory:/pod/engine\n3:cpu,cpuacct:/pod\n1:name=systemd:/pod\n0::/\n"


def read(root: Path, controller: str = "cpu") -> list[list[str]]:
    return list(read_limits(controller, unified="both.max", divided=("first", "second"), root=root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def write(root: Path, cgroup: str, **files: str) -> None:
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_processs_own_cgroup_comes_first(root: Path) -> None:
    write(root, UNIFIED, pod__engine__both_max="1 2\n", pod__both_max="max\n")
    assert read(root) == [["1", "2"], ["max"], []]


def test_the_older_kind_has_a_hierarchy_for_each_controller_and_several_files(root: Path) -> None:
    write(root, DIVIDED, **{"cpu,cpuacct__pod__first": "1\n", "cpu,cpuacct__pod__second": "2\n"})
    assert read(root) == [["1", "2"], [], []]
    assert read(root, "memory") == [[], [], [], []]


def test_where_nothing_can_be_read_there_is_no_limit(root: Path) -> None:
    assert read(root) == []
    (root / "proc/self/cgroup").write_bytes(b"\xff")
    assert read(root) == []
