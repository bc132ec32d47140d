"""Pools give memory back while it is short, down to their floor, and grow again when it is not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvoffload.cache import CacheSettings, IndexReader, LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.server.sessions.memory_guard import MemoryGuard
from kvoffload.server.sessions.memory_watch import FAR_WAIT_S, Reading
from kvoffload.server.sessions.pool_growth import PoolGrowth
from kvoffload.units import MIB
from tests.kit.cache.cache_model import KIB, PLAIN, block_hashes, fingerprint, has_pattern, make_chain
from tests.kit.cache.chains import save_chain
from tests.kit.scarce_threads import scarce_threads
from tests.kit.server.pools import GROWING

PLENTY = Reading(free_bytes=1 << 40, spare_bytes=MIB)
SEGMENT = GROWING.segment_bytes
SMALL_SEGMENTS = CacheSettings(
    memory_bytes=4 * MIB, segment_bytes=MIB, extent_bytes=64 * KIB, entry_limit=4096, step_bytes=MIB, policy="lru"
)


class Watch:
    """A watch whose findings the test sets."""

    def __init__(self) -> None:
        self.found = PLENTY
        self.pool_bytes = 0

    def look(self, pool_bytes: int) -> Reading:
        self.pool_bytes = pool_bytes
        return self.found

    def miss(self, size_bytes: int) -> None:
        self.found = replace(PLENTY, free_bytes=0, reason="cgroup", missing_bytes=size_bytes, limited_by="a cgroup")


class Scene:
    def __init__(self, settings: CacheSettings = GROWING, *, floor_bytes: int = 0) -> None:
        self.cache = LocalCache.create(settings)
        self.pool = PoolGrowth(self.cache, segment_bytes=settings.segment_bytes, floor_bytes=floor_bytes)
        self.watch = Watch()
        self.now_s = 1000.0
        self.guard = MemoryGuard(self.watch, lambda: [self.pool], lambda: self.now_s)  # type: ignore[arg-type]

    def await_growth(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "kvoffload-growth":
                thread.join(60)
        assert self.cache.ready_bytes == self.cache.capacity_bytes

    def close(self) -> None:
        self.guard.close()
        self.pool.close()
        self.cache.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_a_shortage_takes_whole_segments_and_is_logged_with_its_cause(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert scene.guard.turn() == FAR_WAIT_S
    assert scene.watch.pool_bytes == 256 * MIB
    scene.watch.miss(SEGMENT + 1)
    with caplog.at_level(logging.INFO, "kvoffload.server.sessions.pool_growth"):
        scene.guard.turn()
    assert scene.cache.ready_bytes == 128 * MIB
    stats = scene.cache.stats
    assert (stats.given_back_bytes, stats.memory_reason) == (128 * MIB, "cgroup")
    assert [record.getMessage() for record in caplog.records] == [
        "memory is short (a cgroup), so the memory gives 128MiB of its 256MiB back, and keeps 128MiB",
        "the memory has been given back in part: 128MiB of 256MiB are left",
    ]


def test_it_grows_again_after_half_a_minute_without_a_shortage(scene: Scene) -> None:
    scene.watch.miss(1)
    scene.guard.turn()
    assert scene.cache.ready_bytes == 192 * MIB
    scene.watch.found = PLENTY
    scene.now_s += 29.0
    scene.guard.turn()
    assert scene.cache.ready_bytes == 192 * MIB
    # Growing by what was given back would make memory short again.
    scene.now_s += 2.0
    scene.watch.found = replace(PLENTY, free_bytes=MIB + SEGMENT)
    scene.guard.turn()
    assert scene.pool.is_shrinking
    scene.watch.found = PLENTY
    scene.guard.turn()
    scene.await_growth()
    assert scene.cache.stats.memory_reason == ""


def test_a_floor_is_kept_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(floor_bytes=100 * MIB)
    scene.watch.miss(1 << 40)
    with caplog.at_level(logging.WARNING, "kvoffload.server.sessions.pool_growth"):
        for _ in range(3):
            scene.guard.turn()
    assert scene.cache.ready_bytes == 128 * MIB
    assert len(caplog.records) == 1
    scene.close()


def test_a_lease_keeps_its_segment_and_its_bytes_until_it_is_released() -> None:
    scene = Scene(SMALL_SEGMENTS)
    cache = scene.cache
    name_space, session = cache.open_namespace(fingerprint("a"), PLAIN), cache.open_session()
    chains = [make_chain(number, 256) for number in range(4)]
    for chain in chains:
        save_chain(cache, session, name_space, chain)
    leased = cache.acquire_entries(session, name_space, 0, chains[-1])
    slots = list(zip(block_hashes(chains[-1], PLAIN, 0), leased.groups[0].addresses.tolist(), strict=True))
    assert all(address >= 3 * MIB for _, address in slots)
    scene.watch.miss(1 << 40)
    scene.guard.turn()
    assert cache.ready_bytes == 4 * MIB
    assert cache.is_leaving
    scene.watch.found = PLENTY
    assert all(has_pattern(cache, PLAIN, (name_space, 0), name, address) for name, address in slots)
    cache.release(session, leased.lease)
    scene.guard.turn()
    assert cache.ready_bytes == MIB
    assert not cache.is_leaving
    assert cache.lookup(name_space, 0, chains[-1]).all()
    scene.close()


def test_pools_give_back_in_proportion_to_their_sizes() -> None:
    scenes = [Scene(), Scene()]
    watch = scenes[0].watch
    guard = MemoryGuard(watch, lambda: [one.pool for one in scenes], lambda: 1000.0)  # type: ignore[arg-type]
    watch.miss(2 * SEGMENT)
    guard.turn()
    assert [one.cache.ready_bytes for one in scenes] == [192 * MIB, 192 * MIB]
    for one in scenes:
        one.close()


def test_memory_that_is_still_pinned_is_not_asked_for_twice(scene: Scene) -> None:
    reader = IndexReader(scene.cache.open_index())
    reader.mark_pinned(3, True)
    scene.watch.miss(SEGMENT)
    for _ in range(3):
        scene.guard.turn()
    assert scene.cache.ready_bytes == 192 * MIB
    assert scene.cache.stats.given_back_bytes == 0
    scene.watch.found = PLENTY
    reader.mark_pinned(3, False)
    scene.guard.turn()
    assert scene.cache.stats.given_back_bytes == SEGMENT


def test_what_cannot_be_given_back_is_said_once(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(target_bytes: int) -> None:
        raise CacheMemoryError("an old engine has it", remedy="restart it")

    monkeypatch.setattr(scene.cache, "shrink", refuse)
    scene.watch.miss(SEGMENT)
    with caplog.at_level(logging.WARNING, "kvoffload.server.sessions.pool_growth"):
        for _ in range(3):
            scene.guard.turn()
    fault = CacheMemoryError("an old engine has it", remedy="restart it")
    told = [record.getMessage() for record in caplog.records]
    assert told[1:] == [f"the memory cannot be given back: {fault}"]


def test_its_thread_ends_when_it_is_closed_and_is_tried_again_where_there_was_none(scene: Scene) -> None:
    with scarce_threads():
        scene.guard.start()
    scene.guard.start()
    assert [thread.name for thread in threading.enumerate()].count("kvoffload-memory-watch") == 1
    scene.guard.close()
    assert "kvoffload-memory-watch" not in [thread.name for thread in threading.enumerate()]
