"""Pools of servers in tests."""

from __future__ import annotations

from kvoffload.cache import CacheSettings
from kvoffload.units import MIB

GROWING = CacheSettings(
    memory_bytes=256 * MIB, segment_bytes=64 * MIB, extent_bytes=MIB, entry_limit=1000, step_bytes=16 * MIB
)
