"""Durations fall into the first bucket whose bound they do not pass."""

from __future__ import annotations

from kvoffload import native
from kvoffload.cache import CacheSettings, HugePages, LocalCache
from kvoffload.metrics.histogram import CALL_BOUNDS_S, RESIDENCE_BOUNDS_S, Histogram


def test_each_duration_has_its_bucket() -> None:
    times = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        times.add(seconds)
    assert (times.counts, times.sum_s) == ([2, 2, 2], 107.5)


def test_the_bounds_are_those_of_the_native_core() -> None:
    assert [round(bound * 1e9) for bound in CALL_BOUNDS_S] == native.CALL_TIME_BOUNDS_NS
    settings = CacheSettings(
        memory_bytes=1 << 20, segment_bytes=1 << 20, extent_bytes=16 << 10, huge_pages=HugePages.NONE
    )
    with LocalCache.create(settings) as cache:
        assert list(RESIDENCE_BOUNDS_S) == list(cache.stats.residence.bounds_s)
        assert len(cache.stats.residence.counts) == len(RESIDENCE_BOUNDS_S) + 1
