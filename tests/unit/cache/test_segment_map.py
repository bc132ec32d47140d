"""A cache's segments, mapped by a second process: the same bytes, and no others."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvoffload.cache import CacheSettings, LocalCache
from kvoffload.cache.segment_map import SegmentMap
from kvoffload.units import MIB

RECORD_BYTES = 4096


def map_of(cache: LocalCache) -> SegmentMap:
    return SegmentMap([os.dup(file) for file in cache.files.segments], 64 * MIB)


@pytest.fixture(scope="module")
def cache() -> LocalCache:
    return LocalCache.create(CacheSettings(memory_bytes=128 * MIB, segment_bytes=64 * MIB))


def test_slots_are_the_caches_own(cache: LocalCache) -> None:
    segments = map_of(cache)
    assert segments.size_bytes == 128 * MIB
    for address in (0, 64 * MIB - RECORD_BYTES, 64 * MIB, 128 * MIB - RECORD_BYTES):
        segments.view(address, RECORD_BYTES)[:] = address % 251 + 1
        assert set(segments.view(address, RECORD_BYTES).tolist()) == {address % 251 + 1}
        pointer = segments.pointers(np.array([address], np.uint64), RECORD_BYTES)
        assert int(pointer[0]) == segments.view(address, RECORD_BYTES).ctypes.data


def test_pointers_come_in_the_order_of_their_slots(cache: LocalCache) -> None:
    segments = map_of(cache)
    addresses = np.array([64 * MIB, 0, 8192, 64 * MIB + 8192], np.uint64)
    expected = [segments.view(int(address), 1).ctypes.data for address in addresses]
    assert segments.pointers(addresses, RECORD_BYTES).tolist() == expected
    assert segments.pointers(np.zeros(0, np.uint64), RECORD_BYTES).tolist() == []


@pytest.mark.parametrize("address", [128 * MIB, 64 * MIB - RECORD_BYTES + 1, 2**64 - 1])
def test_what_lies_nowhere_is_refused(cache: LocalCache, address: int) -> None:
    segments = map_of(cache)
    with pytest.raises(ValueError, match=f"no segment has 4096 bytes at {address}"):
        segments.pointers(np.array([0, address], np.uint64), RECORD_BYTES)
    with pytest.raises(ValueError, match="no segment has"):
        segments.view(address, RECORD_BYTES)


def test_a_record_larger_than_a_segment_is_refused(cache: LocalCache) -> None:
    with pytest.raises(ValueError, match="no segment has"):
        map_of(cache).pointers(np.array([0], np.uint64), 64 * MIB + 1)


def test_a_view_keeps_the_memory(cache: LocalCache) -> None:
    view = map_of(cache).view(8192, 16)
    view[:] = 77
    assert set(map_of(cache).view(8192, 16).tolist()) == {77}


def test_what_is_no_segment_is_refused(cache: LocalCache) -> None:
    with pytest.raises(ValueError, match="segment 0: "):
        SegmentMap([os.dup(cache.files.segments[0])], 32 * MIB)


def test_a_child_is_refused(cache: LocalCache) -> None:
    segments = map_of(cache)
    child = os.fork()
    if child == 0:
        try:
            segments.view(0, 1)
        except ValueError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_segment_has_its_place_in_this_process(cache: LocalCache) -> None:
    segments = map_of(cache)
    assert segments.ranges() == [(segments.view(at * 64 * MIB, 1).ctypes.data, 64 * MIB) for at in range(2)]
