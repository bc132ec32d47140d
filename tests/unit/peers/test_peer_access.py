"""A peer's access to a memory can break nothing, and has bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import CacheGeometry, CacheSettings, LocalCache, StoredBlocks
from kvoffload.peers import PeerSpace, SpaceTable
from kvoffload.peers.peer_access import STAGED_S, PeerAccess
from kvoffload.tiers.base import RecordNames, RecordOutcome
from kvoffload.types import Fingerprint
from tests.kit.peers.one_peer import same_groups
from tests.kit.tiers.tier_contract import FINGERPRINT, hashes_of

RECORD = 3000
SETTINGS = CacheSettings(memory_bytes=1 << 20, segment_bytes=1 << 20, extent_bytes=16 << 10, entry_limit=4096)


class Setting:
    """`now_s` is moved by the test."""

    def __init__(self, cache: LocalCache, geometry: CacheGeometry) -> None:
        self.cache = cache
        self.now_s = 100.0
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self.below: set[bytes] = set()
        self.brought: list[tuple[bytes, float]] = []
        spaces = SpaceTable()
        spaces.learn(cache.open_namespace(Fingerprint(FINGERPRINT), geometry), FINGERPRINT, geometry)
        self.access = PeerAccess(
            cache,
            spaces,
            self,
            pidfd=os.pidfd_open(os.getpid()),
            clock=lambda: self.now_s,
        )

    # ---- the server's loop ----

    def tell_stored(self, space: PeerSpace, stored: StoredBlocks) -> None:
        self.stored.append(stored.hashes)

    def remove(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> bool:
        self.removed.append(hashes)
        return wait_s > 0

    def find_below(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.array([names.hashes[at : at + 32] in self.below for at in range(0, len(names.hashes), 32)], np.bool_)

    def bring(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> None:
        """Brings what is in a slower tier at once."""
        self.brought.append((hashes, wait_s))
        for at in range(0, len(hashes), 32):
            names = RecordNames(fingerprint=FINGERPRINT, hashes=hashes[at : at + 32], group=group)
            for shard in range(space.geometry.groups[group].shards):
                self.put(replace(names, shard=shard))
            self.below.discard(hashes[at : at + 32])

    def names(self, first: int, count: int, shard: int = 0, group: int = 0) -> RecordNames:
        return RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(first, count), group=group, shard=shard)

    def put(self, names: RecordNames) -> list[int]:
        """Puts records as if the right bytes had come."""
        room = self.access.reserve(names, RECORD)
        assert room is not None
        digests = np.arange(1, 1 + len(room.slots), dtype=np.uint64)
        parents = bytes(32 * len(names))
        return self.access.commit(room, names, claimed=digests, found=digests, parents=parents).tolist()


@pytest.fixture(params=[1, 2], ids=["whole", "two shards"])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def setting(shards: int) -> Iterator[Setting]:
    with LocalCache.create(SETTINGS) as cache:
        yield Setting(cache, same_groups(RECORD, shards=shards))


@pytest.fixture
def sharded() -> Iterator[Setting]:
    with LocalCache.create(SETTINGS) as cache:
        yield Setting(cache, same_groups(RECORD, shards=2))


def test_what_is_held_is_not_evicted_until_it_is_released(setting: Setting, shards: int) -> None:
    for shard in range(shards):
        setting.put(setting.names(0, 4, shard))
    held = setting.access.acquire(setting.names(0, 5), RECORD)
    assert held.found.tolist() == [True] * 4 + [False]
    assert held.digests.tolist() == [1, 2, 3, 4]
    setting.cache.evict(1 << 20)
    assert setting.access.look(setting.names(0, 4)).tolist() == [RecordOutcome.FOUND] * 4
    setting.access.release(held)
    setting.cache.evict(1 << 20)
    assert setting.access.look(setting.names(0, 4)).tolist() == [RecordOutcome.MISSING] * 4
    assert setting.cache.stats.leases == 0


def test_other_names_sizes_and_shards_are_missing_or_refused(setting: Setting, shards: int) -> None:
    strange = [setting.names(0, 2, group=7), setting.names(0, 2, shard=shards)]
    strange.append(RecordNames(fingerprint=b"S" * 32, hashes=hashes_of(0, 2)))
    for names in strange:
        assert setting.access.look(names).tolist() == [RecordOutcome.MISSING] * 2
        assert setting.access.remove(names, wait_s=1).tolist() == [RecordOutcome.MISSING] * 2
        assert not setting.access.acquire(names, RECORD).found.any()
        assert setting.access.reserve(names, RECORD) is None
    assert setting.access.reserve(setting.names(0, 2), RECORD + 1) is None


def test_memory_that_is_full_of_what_is_held_refuses(setting: Setting, shards: int) -> None:
    count = (1 << 20) // (RECORD * shards)
    assert set(setting.put(setting.names(0, count))) == {RecordOutcome.FAILED}, "more than links may hold together"
    assert setting.cache.stats.reserved == 0
    for first in range(0, 3 * count, 8):
        for shard in range(shards):
            assert set(setting.put(setting.names(first, 8, shard))) == {RecordOutcome.WRITTEN}
    assert setting.cache.stats.evicted > 0


def test_what_has_not_come_leaves_nothing_behind(setting: Setting) -> None:
    names = setting.names(0, 4)
    room = setting.access.reserve(names, RECORD)
    assert room is not None
    setting.access.abort(room, names)
    setting.now_s += STAGED_S + 1
    setting.access.tick()
    assert setting.cache.stats.reserved == 0
    assert setting.put(names) == [RecordOutcome.WRITTEN] * 4


def test_the_loop_hears_of_a_block_when_it_is_whole(sharded: Setting) -> None:
    sharded.put(sharded.names(0, 3, shard=1))
    assert sharded.stored == []
    sharded.put(sharded.names(1, 3, shard=0))
    assert sharded.stored == [hashes_of(1, 2)]
    assert sharded.access.look(sharded.names(0, 4)).tolist() == [
        RecordOutcome.MISSING,
        RecordOutcome.FOUND,
        RecordOutcome.FOUND,
        RecordOutcome.MISSING,
    ]


def test_a_shard_that_another_link_brings_is_not_wanted_twice(sharded: Setting) -> None:
    names = sharded.names(0, 2)
    first = sharded.access.reserve(names, RECORD)
    second = sharded.access.reserve(names, RECORD)
    assert first is not None
    assert second is not None
    assert (len(first.slots), len(second.slots)) == (2, 0)
    other = sharded.access.reserve(sharded.names(0, 2, shard=1), RECORD)
    assert other is not None
    assert (other.slots == first.slots + np.uint64(RECORD)).all()


def test_blocks_whose_other_shards_do_not_come_are_given_up(sharded: Setting) -> None:
    sharded.put(sharded.names(0, 3))
    sharded.now_s += STAGED_S - 1
    sharded.put(sharded.names(3, 3))
    assert sharded.cache.stats.reserved == 6
    sharded.now_s += 2
    sharded.access.tick()
    assert sharded.cache.stats.reserved == 3
    # The late half of a block starts a new reservation.
    assert sharded.put(sharded.names(0, 3, shard=1)) == [RecordOutcome.WRITTEN] * 3
    assert sharded.access.look(sharded.names(0, 3)).tolist() == [RecordOutcome.MISSING] * 3


def test_what_lies_below_is_there_and_comes_up_for_whoever_waits(setting: Setting, shards: int) -> None:
    for shard in range(shards):
        setting.put(setting.names(0, 2, shard))
    setting.below = {hashes_of(at, 1) for at in (2, 3)}
    assert setting.access.look(setting.names(0, 5)).tolist() == [RecordOutcome.FOUND] * 4 + [RecordOutcome.MISSING]
    held = setting.access.acquire(setting.names(0, 5), RECORD)
    assert held.found.tolist() == [True, True, False, False, False]
    assert setting.brought == []
    setting.access.release(held)
    held = setting.access.acquire(setting.names(0, 5), RECORD, wait_s=0.5)
    assert held.found.tolist() == [True] * 4 + [False]
    assert setting.brought == [(hashes_of(2, 2), 0.5)]
    setting.access.release(held)


def test_what_is_removed_is_removed_below_too(setting: Setting, shards: int) -> None:
    for shard in range(shards):
        setting.put(setting.names(0, 1, shard))
    setting.below = {hashes_of(1, 1)}
    outcomes = setting.access.remove(setting.names(0, 3), wait_s=1).tolist()
    assert outcomes == [RecordOutcome.REMOVED, RecordOutcome.REMOVED, RecordOutcome.MISSING]
    assert setting.removed == [hashes_of(0, 3)]


def test_what_the_loop_has_not_removed_in_time_is_not_called_removed(setting: Setting) -> None:
    setting.below = {hashes_of(0, 1)}
    assert setting.access.remove(setting.names(0, 2), wait_s=0).tolist() == [RecordOutcome.FAILED] * 2


def test_a_slot_that_a_link_is_writing_is_nobody_elses(sharded: Setting) -> None:
    """However long that takes: the process may have been stopped in the middle of it."""
    names = sharded.names(0, 2)
    room = sharded.access.reserve(names, RECORD)
    assert room is not None
    sharded.now_s += 100 * STAGED_S
    sharded.access.tick()
    assert sharded.cache.stats.reserved == 2
    digests = np.array([1, 2], np.uint64)
    sharded.access.commit(room, names, claimed=digests, found=digests, parents=bytes(64))
    sharded.now_s += STAGED_S + 1
    sharded.access.tick()
    assert sharded.cache.stats.reserved == 0


def test_a_link_that_comes_late_leaves_what_was_staged_anew(sharded: Setting) -> None:
    names = sharded.names(0, 1)
    late = sharded.access.reserve(names, RECORD)
    assert late is not None
    sharded.access.abort(late, names)
    sharded.now_s += STAGED_S + 1
    sharded.access.tick()
    newer = sharded.access.reserve(names, RECORD)
    assert newer is not None
    sharded.access.abort(late, names)
    assert len(sharded.access.reserve(names, RECORD).slots) == 0, "the shard is coming"  # type: ignore[union-attr]


def test_a_name_that_comes_twice_is_reserved_once(setting: Setting, shards: int) -> None:
    twice = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(0, 1) * 2)
    for shard in range(shards):
        setting.put(replace_shard(twice, shard))
    setting.now_s += STAGED_S + 1
    setting.access.tick()
    assert setting.cache.stats.reserved == 0
    assert setting.access.look(setting.names(0, 1)).tolist() == [RecordOutcome.FOUND]


def replace_shard(names: RecordNames, shard: int) -> RecordNames:
    return RecordNames(fingerprint=names.fingerprint, hashes=names.hashes, group=names.group, shard=shard)
