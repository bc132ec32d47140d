"""Each limit made to bind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.doctor.findings import Verdict
from kvoffload.doctor.limit_checks import Wanted, check_limits
from kvoffload.doctor.machine import Machine
from kvoffload.native import HugePagePool
from kvoffload.units import GIB, MIB
from tests.kit.doctor.machines import GOOD, able, like, limited

WANTED = Wanted(memory_bytes=16 * GIB, segment_bytes=GIB)


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = list(check_limits(GOOD, WANTED))
    assert {one.verdict for one in found} == {Verdict.OK}
    assert len({one.check for one in found}) == len(found) == 9


@pytest.mark.parametrize(
    ("machine", "check", "verdict", "text"),
    [
        (like(headroom_bytes=8 * GIB), "memory", Verdict.FAIL, "8GiB can be had, by a cgroup's limit"),
        (
            like(headroom_bytes=8 * GIB, available_bytes=8 * GIB),
            "memory",
            Verdict.FAIL,
            "16GiB are wanted, and 8GiB can be had, by the machine's memory",
        ),
        (like(commit_room_bytes=GIB), "overcommit", Verdict.FAIL, "1GiB may still be promised"),
        (limited("file size", 512 * MIB), "file size", Verdict.FAIL, "512MiB"),
        (limited("open files", 527), "open files", Verdict.FAIL, "up to 528"),
        (
            limited("threads", 1024),
            "threads",
            Verdict.WARN,
            "1024 (RLIMIT_NPROC, pids.max) leave room for 512 processes",
        ),
        (limited("threads", 2559), "threads", Verdict.WARN, "2047 processes"),
        (limited("address space", 16 * GIB), "address space", Verdict.FAIL, "16GiB"),
        (like(shm_bytes=64 * MIB), "/dev/shm", Verdict.WARN, "64MiB"),
        (able(transparent_huge_pages_in_shmem="never"), "huge pages", Verdict.WARN, "never"),
        (able(transparent_huge_pages_in_shmem=""), "huge pages", Verdict.WARN, "unknown"),
    ],
)
def test_what_binds_is_said(machine: Machine, check: str, verdict: Verdict, text: str) -> None:
    found = {one.check: one for one in check_limits(machine, WANTED)}
    assert found[check].verdict is verdict
    assert text in found[check].text
    assert {one.verdict for name, one in found.items() if name != check} == {Verdict.OK}


@pytest.mark.parametrize(
    "machine",
    [
        like(commit_room_bytes=16 * GIB),
        limited("open files", 528),
        limited("threads", 2560),
        limited("address space", 17 * GIB),
        limited("file size", GIB),
        replace(
            able(
                transparent_huge_pages_in_shmem="never", huge_pages=(HugePagePool(page_bytes=2 * MIB, total=4, free=4),)
            )
        ),
    ],
)
def test_what_is_just_enough_is_enough(machine: Machine) -> None:
    assert {one.verdict for one in check_limits(machine, WANTED)} == {Verdict.OK}
