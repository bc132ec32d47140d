"""Counts that no server has told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvoffload.cache import CacheStats, PlaceUsage, TenantUsage
from kvoffload.units import GIB

STATS = CacheStats(
    capacity_bytes=16 * GIB,
    used_bytes=4 * GIB,
    readable=1000,
    reserved=3,
    quarantined=0,
    leases=2,
    sessions=5,
    namespaces=1,
    index_bytes=1 << 20,
    hits=100,
    misses=50,
    refused=0,
    duplicates=7,
    evicted=10,
    mismatches=0,
    moved_bytes=0,
    lost_touches=0,
    tenants=(TenantUsage(name="", quota_bytes=0, used_bytes=4 * GIB),),
)
DISK = PlaceUsage(
    tier="disk", name="/nvme0/kv", state="ready", reason="", capacity_bytes=100 * GIB, used_bytes=GIB, records=9
)


def stats(**changes: Any) -> CacheStats:
    return replace(STATS, **changes)
