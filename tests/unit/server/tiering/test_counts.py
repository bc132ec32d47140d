"""Counts as they go over the wire."""

from __future__ import annotations

from dataclasses import fields

from kvoffload.cache import CacheStats, TenantUsage
from kvoffload.protocol import Draining, TenantCounts
from kvoffload.server.tiering.counts import describe_counts, describe_draining

NAMES = [field.name for field in fields(CacheStats) if field.name not in ("tenants", "places", "traffic", "residence")]
STATS = CacheStats(
    tenants=(TenantUsage(name="a", quota_bytes=1, used_bytes=2),), **{name: at for at, name in enumerate(NAMES)}
)


def test_every_count_is_told() -> None:
    counts = describe_counts(STATS)
    assert [getattr(counts, name) for name in NAMES] == list(range(len(NAMES)))
    assert counts.tenants == (TenantCounts(name="a", quota_bytes=1, used_bytes=2),)


def test_what_is_held_counts_over_all_domains() -> None:
    assert describe_draining([], 3) == Draining(leases=0, reserved=0, sessions=3)
    two = describe_draining([STATS, STATS], 1)
    assert two == Draining(leases=2 * STATS.leases, reserved=2 * STATS.reserved, sessions=1)
