"""Coded and plain records are counted and measured in turn on a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.coded_disk import GROUPS, SEGMENT_BYTES, count_fitting, measure, reading_at
from tests.kit.tiers.tier_contract import Records

NUMBERS = [memoryview(record.tobytes()) for record in Records(0, 16, 1 << 18, filled=True, has_numbers=True).memory]


def test_a_disk_holds_more_records_if_they_are_coded(tmp_path: Path) -> None:
    found = count_fitting(NUMBERS, tmp_path, capacity_bytes=4 * SEGMENT_BYTES)
    assert list(found) == ["off", "on", "auto"]
    assert 0 < found["off"]["records"] <= 4 * SEGMENT_BYTES // len(NUMBERS[0])
    assert found["on"]["records"] >= 1.25 * found["off"]["records"]
    assert found["on"]["ratio"] == round(found["on"]["records"] / found["off"]["records"], 3)


def test_every_way_to_code_is_measured_on_the_same_records(tmp_path: Path) -> None:
    found = measure(NUMBERS, tmp_path, rounds=1, turn_s=0.0)
    assert (found["off"]["coded"], found["on"]["coded"]) == (0, 1)
    assert all(one["read_ms"] > 0 for one in found.values())
    assert found["off"]["read_gain"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_limit_ends_with_its_measurement(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not (GROUPS / "cgroup.procs").is_file():
        pytest.skip("control groups of version 1 with blkio, and root, are needed")
    before = Path("/proc/self/cgroup").read_text(encoding="ascii")
    groups = set(GROUPS.iterdir())
    try:
        with reading_at(100, tmp_path):
            assert Path("/proc/self/cgroup").read_text(encoding="ascii") != before
    except OSError as fault:
        pytest.skip(f"this folder's device cannot be limited: {fault}")
    assert Path("/proc/self/cgroup").read_text(encoding="ascii") == before
    assert set(GROUPS.iterdir()) == groups
