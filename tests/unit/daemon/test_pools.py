"""Memory that is taken beside the loop, and what becomes of it when it is not wanted any more."""

from __future__ import annotations

import os
import time

import pytest

from kvoffload.cache import CacheTerms, LocalCache
from kvoffload.daemon.pools import Pools
from kvoffload.errors import CacheMemoryError
from kvoffload.protocol import AdoptVerdict
from kvoffload.units import MIB
from tests.open_files import count_open_files
from tests.unit.cache.cache_model import SMALL

WAIT_S = 30.0


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
    pools = Pools({"": CacheTerms(memory_bytes=1 << 50, segment_bytes=1 << 40)})
    pools.begin()
    with pytest.raises(CacheMemoryError, match="cannot be had"):
        take_all(pools, 1)
    pools.stop()


def test_what_was_being_taken_is_let_go_of() -> None:
    before = count_open_files()
    pools = Pools({"": CacheTerms(memory_bytes=256 * MIB, segment_bytes=64 * MIB)})
    pools.begin()
    pools.stop()
    pools.close()
    assert pools.caches == {}
    # A lock that was made is kept for as long as this process lives.
    assert count_open_files() <= before + 1


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
