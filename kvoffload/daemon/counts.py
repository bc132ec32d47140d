"""What operators and dashboards are told of the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from kvoffload.cache import CacheStats
from kvoffload.protocol import Counts, Draining, TenantCounts
from kvoffload.protocol.limits import MAX_TENANTS

_NAMES = tuple(field.name for field in fields(Counts) if field.name != "tenants")


def describe_counts(stats: CacheStats) -> Counts:
    """One domain's."""
    tenants = tuple(
        TenantCounts(name=tenant.name, quota_bytes=tenant.quota_bytes, used_bytes=tenant.used_bytes)
        for tenant in stats.tenants[:MAX_TENANTS]
    )
    return Counts(tenants=tenants, **{name: getattr(stats, name) for name in _NAMES})


def describe_draining(every: Iterable[CacheStats], sessions: int) -> Draining:
    """What a server still waits for, in all its domains."""
    counts = [(stats.leases, stats.reserved) for stats in every]
    leases, reserved = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return Draining(leases=leases, reserved=reserved, sessions=sessions)
