"""Settings with which a cache is made."""

from __future__ import annotations

import pytest

from kvoffload.cache import CacheSettings, LocalCache
from kvoffload.units import GIB, MIB


@pytest.mark.parametrize(
    ("memory_bytes", "entry_limit", "expected"),
    [(MIB, 0, 65536), (GIB, 0, 1 << 20), (1 << 50, 0, 1 << 28), (GIB, 77, 77)],
)
def test_the_index_is_made_for_what_fits(memory_bytes: int, entry_limit: int, expected: int) -> None:
    assert CacheSettings(memory_bytes=memory_bytes, entry_limit=entry_limit).limit_entries() == expected


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (CacheSettings(memory_bytes=0), "needs memory for at least one segment"),
        (CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=3000), "multiple of 512, it is 3000"),
        (CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=1536), "multiple of extent_bytes"),
        (CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=MIB, policy="mru"), "known are .*lru"),
    ],
)
def test_settings_that_contradict_themselves_are_one_clear_line(settings: CacheSettings, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        LocalCache.create(settings)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"memory_bytes": -1}, r"^memory_bytes is -1, allowed are numbers from 0 to 2\*\*64 - 1$"),
        ({"keep_free_bytes": 1 << 64}, "keep_free_bytes is 18446744073709551616"),
        ({"entry_limit": 1 << 32}, r"entry_limit is 4294967296, allowed are numbers from 0 to 2\*\*32 - 1"),
        ({"threads": -2}, "threads is -2"),
        ({"verify": "never"}, "^verify is 'never', allowed are 'tiers' and 'always'$"),
    ],
)
def test_settings_that_nobody_can_serve_are_one_clear_line(change: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        CacheSettings(**{"memory_bytes": MIB, **change})  # type: ignore[arg-type]
