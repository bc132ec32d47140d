"""Blocks that disks have lost are found sooner or later, at a bounded cost a call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.tiering.watched_blocks import CALL_BLOCKS, PART_BLOCKS, WatchedBlocks
from tests.kit.cache.cache_model import make_chain

SPACE = Space(domain="main", name_space=7, fingerprint=b"f" * 32)
CHAIN = make_chain(1, 40)


class Disk:
    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.asked = self.calls = 0
        self.fault: OSError | None = None

    def find(self, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.asked += len(names)
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return np.array([name not in self.gone for name in names], np.bool_)


def part(first: int, end: int) -> bytes:
    return CHAIN[32 * first : 32 * end]


def test_all_are_looked_up_in_turn() -> None:
    watched, disk = WatchedBlocks[Space](100), Disk()
    for first in range(0, 40, 4):
        assert watched.add(SPACE, first // 4, part(first, first + 4), disk.find) == part(first, first + 4)
    disk.gone = {part(5, 6), part(30, 31), *(part(at, at + 1) for at in range(16, 20))}
    told: list[tuple[Space, int, bytes]] = []
    for call in range(1, 6):
        told += watched.check(2 * (4 + CALL_BLOCKS))
        assert disk.asked == 8 * call
    assert told == [(SPACE, 1, part(5, 6)), (SPACE, 4, part(16, 20)), (SPACE, 7, part(30, 31))]
    assert len(watched) == 34
    disk.gone.add(part(0, 1))
    assert list(watched.check(10_000)) == [(SPACE, 0, part(0, 1))]
    assert disk.asked == 40 + 34


def test_blocks_that_come_one_by_one_are_looked_up_together() -> None:
    watched, disk = WatchedBlocks[Space](10 * PART_BLOCKS), Disk()
    chain = make_chain(2, 2 * PART_BLOCKS)
    names = [chain[at : at + 32] for at in range(0, len(chain), 32)]
    for name in names:
        for group in (0, 1):
            watched.add(replace(SPACE), group, name, disk.find)
    assert (len(watched), watched.part_count) == (4 * PART_BLOCKS, 4)
    disk.gone = {names[3], names[-1]}
    gone = {(group, name) for _, group, name in watched.check(10 * PART_BLOCKS)}
    assert gone == {(group, name) for group in (0, 1) for name in disk.gone}
    assert disk.calls == 4
    disk.gone = set(names)
    list(watched.check(10 * PART_BLOCKS))
    assert (len(watched), watched.part_count) == (0, 0)


def test_many_small_parts_are_not_all_looked_up_at_once() -> None:
    watched, disk = WatchedBlocks[Space](100), Disk()
    for group in range(40):
        watched.add(SPACE, group, part(group, group + 1), disk.find)
    list(watched.check(10 * CALL_BLOCKS))
    assert disk.calls == 10


def test_a_disk_that_fails_loses_nothing_and_holds_up_nobody() -> None:
    watched, disk, failing = WatchedBlocks[Space](10), Disk(), Disk()
    watched.add(SPACE, 0, part(0, 4), failing.find)
    watched.add(SPACE, 1, part(4, 8), disk.find)
    failing.fault = OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        list(watched.check(1000))
    disk.gone = failing.gone = {part(1, 2), part(5, 6)}
    assert list(watched.check(1)) == [(SPACE, 1, part(5, 6))]
    failing.fault = None
    assert list(watched.check(1)) == [(SPACE, 0, part(1, 2))]
    assert len(watched) == 6


def test_forgotten_spaces_are_watched_no_more() -> None:
    watched, disk = WatchedBlocks[Space](8), Disk()
    other = replace(SPACE, name_space=8)
    watched.add(SPACE, 0, part(0, 4), disk.find)
    watched.add(other, 0, part(4, 8), disk.find)
    watched.forget(lambda space: space == SPACE)
    assert len(watched) == 4
    assert watched.add(SPACE, 0, part(0, 1), disk.find) == part(0, 1)
    disk.gone = {part(at, at + 1) for at in range(8)}
    assert list(watched.check(1000)) == [(other, 0, part(4, 8)), (SPACE, 0, part(0, 1))]


def test_those_beyond_the_bound_are_not_watched() -> None:
    watched, disk = WatchedBlocks[Space](5), Disk()
    assert watched.add(SPACE, 0, part(0, 3), disk.find) == part(0, 3)
    assert watched.add(SPACE, 0, part(3, 6), disk.find) == part(3, 5)
    assert watched.add(SPACE, 0, part(6, 7), disk.find) == b""
    disk.gone = {part(0, 1)}
    assert list(watched.check(10)) == [(SPACE, 0, part(0, 1))]
    assert watched.add(SPACE, 0, part(6, 8), disk.find) == part(6, 7)


def test_of_nothing_nothing_is_asked() -> None:
    assert list(WatchedBlocks[Space](5).check(10)) == []
