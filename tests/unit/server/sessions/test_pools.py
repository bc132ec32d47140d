"""Memory that is taken outside of the loop, and its end when it is not wanted any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kvoffload.cache import CacheSettings, LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.protocol import AdoptVerdict
from kvoffload.server.sessions.pools import Pools
from kvoffload.units import MIB
from tests.kit.cache.cache_model import SMALL
from tests.kit.open_files import count_open_files
from tests.kit.server.pools import GROWING

WAIT_S = 30.0


def await_that(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def take_all(pools: Pools, count: int) -> list[str]:
    end_s = time.monotonic() + WAIT_S
    taken: list[str] = []
    while len(taken) < count:
        taken += pools.take_ready()
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return taken


def test_each_domain_has_its_own() -> None:
    pools = Pools({"a": SMALL, "b": SMALL})
    assert pools.take_ready() == []
    pools.begin()
    assert sorted(take_all(pools, 2)) == ["a", "b"]
    assert pools.caches.keys() == {"a", "b"}
    pools.begin()
    assert pools.take_ready() == []
    pools.stop()
    pools.close()


def test_memory_that_cannot_be_had_is_said() -> None:
    pools = Pools({"": CacheSettings(memory_bytes=1 << 50, segment_bytes=1 << 40)})
    pools.begin()
    with pytest.raises(CacheMemoryError, match="cannot be had"):
        take_all(pools, 1)
    pools.stop()


def test_what_was_being_taken_is_let_go_of() -> None:
    before = count_open_files()
    pools = Pools({"": GROWING})
    pools.begin()
    pools.stop()
    pools.close()
    assert pools.caches == {}
    # A lock that was made is kept for as long as this process lives.
    assert count_open_files() <= before + 1


def test_a_pool_is_there_with_its_first_memory_and_grows() -> None:
    pools = Pools({"": GROWING})
    pools.begin()
    take_all(pools, 1)
    cache = pools.caches[""]
    assert cache.ready_bytes >= 16 * MIB
    await_that(lambda: cache.ready_bytes == cache.capacity_bytes)
    pools.stop()
    pools.close()


def test_a_pool_that_grows_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[LocalCache] = []
    may_go_on = threading.Event()
    grow = LocalCache.grow

    def grow_slowly(self: LocalCache, _keep_free_bytes: int) -> bool:
        steps.append(self)
        assert may_go_on.wait(60)
        return grow(self)

    monkeypatch.setattr(LocalCache, "grow", grow_slowly)
    pools = Pools({"": GROWING})
    pools.begin()
    take_all(pools, 1)
    cache = pools.caches[""]
    pools.stop_growing()
    may_go_on.set()
    pools.stop()
    # The step that was begun was given up, and no other came.
    assert len(steps) <= 1
    assert cache.ready_bytes == 16 * MIB
    pools.close()


def test_a_pool_that_had_grown_in_part_is_adopted_and_grows_on() -> None:
    with LocalCache.begin(GROWING) as former:
        assert former.grow()
        files = former.files
        copies = [os.dup(file) for file in (files.lock, files.index, *files.segments)]
    pools = Pools({"": GROWING})
    assert pools.adopt("", copies, 0) is None
    cache = pools.caches[""]
    assert cache.ready_bytes >= 32 * MIB
    await_that(lambda: cache.ready_bytes == 256 * MIB)
    pools.stop()
    pools.close()


def test_the_memory_of_a_server_that_lives_is_not_adopted() -> None:
    with LocalCache.create(SMALL) as alive:
        files = alive.files
        pools = Pools({"": SMALL})
        assert pools.adopt("", [_copy(file) for file in (files.lock, files.index, *files.segments)], 7) in (
            AdoptVerdict.OWNER_LIVES,
            AdoptVerdict.NOT_USABLE,
        )
        assert pools.caches == {}
        pools.stop()


def _copy(file: int) -> int:
    """By another descriptor of the same file, as one that came over a socket is."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDWR)
