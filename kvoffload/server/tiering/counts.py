"""Counts of the cache for operators and dashboards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.protocol import Counts, Draining, PlaceCounts, TenantCounts, TrafficCounts
from kvoffload.protocol.limits import LINE_BYTES, MAX_PLACES, MAX_TENANTS, NAME_BYTES
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.traffic import TierTraffic

_CODED = ("coded_records", "coded_bytes", "coded_stored_bytes")


def describe_counts(stats: CacheStats, traffic: TierChain | None = None) -> Counts:
    """Returns the counts of one domain."""
    tenants = tuple(
        TenantCounts(name=tenant.name, quota_bytes=tenant.quota_bytes, used_bytes=tenant.used_bytes)
        for tenant in stats.tenants[:MAX_TENANTS]
    )
    counts: dict[str, Any] = {name: value for name, value in vars(stats).items() if isinstance(value, int)}
    counts["memory_reason"] = stats.memory_reason
    if traffic is None:
        return Counts(tenants=tenants, **counts)
    moved = tuple(
        TrafficCounts(
            tier=tier.settings.name,
            waiting_bytes=tier.waiting_bytes,
            waiting_requests=tier.waiting_requests,
            **asdict(tier.counts),
        )
        for tier in traffic.tiers
    )
    places = tuple(place for tier in traffic.tiers for place in _describe_places(tier))
    return Counts(tenants=tenants, places=places[:MAX_PLACES], traffic=moved, **counts)


def describe_draining(every: Iterable[CacheStats], sessions: int) -> Draining:
    """Returns what a draining server still waits for, in all its domains."""
    counts = [(stats.leases, stats.reserved) for stats in every]
    leases, reserved = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return Draining(leases=leases, reserved=reserved, sessions=sessions)


def _describe_places(tier: TierTraffic) -> Iterable[PlaceCounts]:
    for one in tier.health()[:MAX_PLACES]:
        yield PlaceCounts(
            tier=cut_text(tier.settings.name, NAME_BYTES),
            name=cut_text(one.name, LINE_BYTES),
            state=one.state.value,
            reason=cut_text(one.reason, LINE_BYTES),
            capacity_bytes=one.capacity_bytes,
            used_bytes=one.used_bytes,
            records=one.records,
            **{name: one.counts.get(name, 0) for name in _CODED},
        )


def cut_text(text: str, size_bytes: int) -> str:
    """Returns at most so many bytes of a text."""
    return text.encode()[:size_bytes].decode(errors="ignore")
