"""What disks have no more is found sooner or later, at a bounded cost a call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.server.event_feed import Space
from kvoffload.server.tiering.watched_blocks import WatchedBlocks
from tests.kit.cache.cache_model import make_chain

SPACE = Space(domain="main", name_space=7, fingerprint=b"f" * 32)
CHAIN = make_chain(1, 40)


class Disk:
    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.asked = 0

    def find(self, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.asked += len(names)
        return np.array([name not in self.gone for name in names], np.bool_)


def part(first: int, end: int) -> bytes:
    return CHAIN[32 * first : 32 * end]


def test_all_are_looked_up_in_turn() -> None:
    watched, disk = WatchedBlocks[Space](100), Disk()
    for first in range(0, 40, 4):
        assert watched.add(SPACE, first % 3, part(first, first + 4), disk.find) == part(first, first + 4)
    disk.gone = {part(5, 6), part(30, 31), *(part(at, at + 1) for at in range(16, 20))}
    told: list[tuple[Space, int, bytes]] = []
    for call in range(1, 6):
        told += watched.check(8)
        assert disk.asked == 8 * call
    assert told == [(SPACE, 1, part(5, 6)), (SPACE, 1, part(16, 20)), (SPACE, 1, part(30, 31))]
    assert len(watched) == 34
    disk.gone.add(part(0, 1))
    assert list(watched.check(100)) == [(SPACE, 0, part(0, 1))]
    assert disk.asked == 40 + 34


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
