"""A server's counts at two moments, and what happened in between. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.cache import CacheStats, PlaceUsage
from kvoffload.client.insight import ServerInsight, TimedCalls
from kvoffload.client.inspector import NO_ENGINES, EngineSurvey
from kvoffload.metrics.histogram import CALL_BOUNDS_S, RESIDENCE_BOUNDS_S, WAIT_BOUNDS_S
from kvoffload.protocol import LedgerKind
from kvoffload.top.ledger_rows import NO_PRICES, Prices, list_rows
from kvoffload.top.memory_worth import MemoryWorth, find_worth

_BOUNDS_S = {"call": CALL_BOUNDS_S, "promotion": WAIT_BOUNDS_S, "residence": RESIDENCE_BOUNDS_S}
LEDGER_ROWS = 8
"""Number of rows of each kind of the ledger that a sample's row has."""
COUNTED = ("hits", "misses", "refused", "evicted", "duplicates")
NO_COUNTS: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A server's counts at one moment. `stats` is None where the server did not answer, and `fault` says why."""

    time_s: float
    stats: CacheStats | None
    insight: ServerInsight | None = None
    """The server's insight; None although `stats` is not: the server is of an earlier version."""
    survey: EngineSurvey | None = NO_ENGINES
    """The engines that have joined; None: the server tells this to operators only."""
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class TierLine:
    """One tier below memory: its places together, and its traffic a second."""

    name: str
    places: tuple[PlaceUsage, ...]
    rates: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def state(self) -> str:
        """The worst of its places, with why."""
        bad = next((place for place in self.places if place.state != "ready"), None)
        return "ready" if bad is None else f"{bad.state}: {bad.reason}".rstrip(": ")

    @property
    def used_bytes(self) -> int:
        return sum(place.used_bytes for place in self.places)

    @property
    def capacity_bytes(self) -> int:
        return sum(place.capacity_bytes for place in self.places)

    @property
    def coded_ratio(self) -> float | None:
        """Returns how many times as long coded records were before. None: none was coded."""
        stored = sum(place.coded_stored_bytes for place in self.places)
        return sum(place.coded_bytes for place in self.places) / stored if stored else None

    @property
    def coded_share(self) -> float | None:
        """Returns which share of the bytes written was coded: what `auto` has decided. None: nothing was written, or
        what peers coded for us counts, too. What others had written to a store before counts as written, and not as
        coded."""
        written = 0 if self.name == "peer" else self.counts.get("written_bytes", 0)
        # Records that a disk wrote again to keep them count as coded, and not as written.
        return min(sum(place.coded_bytes for place in self.places) / written, 1.0) if written else None


@dataclass(frozen=True, kw_only=True)
class View:
    """Two samples as what is shown: rates a second over the time between them."""

    stats: CacheStats
    rates: Mapping[str, float]
    tiers: tuple[TierLine, ...]
    insight: ServerInsight | None = None
    outcomes: Mapping[str, float] = field(default_factory=dict)
    """Prompt tokens a second, by what became of them."""
    prices: Prices = NO_PRICES

    @property
    def worth(self) -> MemoryWorth | None:
        """The worth of other amounts of memory; None: the server is of an earlier version."""
        return None if self.insight is None else find_worth(self.stats, self.insight, self.prices)

    @property
    def hit_rate(self) -> float | None:
        """The share of hits of the acquires in between; None: there were none."""
        asked = self.rates["hits"] + self.rates["misses"]
        return self.rates["hits"] / asked if asked else None

    @property
    def fill(self) -> float:
        return self.stats.used_bytes / self.stats.capacity_bytes if self.stats.capacity_bytes else 0.0


def compare(before: Sample | None, now: Sample, prices: Prices = NO_PRICES) -> View | None:
    """Compares two samples. None: there is nothing to show. The counts of a server that was restarted begin at 0."""
    if now.stats is None:
        return None
    old = None if before is None else before.stats
    span_s = 0.0 if before is None else now.time_s - before.time_s

    def rate(count: int, earlier: int | None) -> float:
        """0 where there is nothing to compare with."""
        if earlier is None or span_s <= 0:
            return 0.0
        return (count if count < earlier else count - earlier) / span_s

    stats = now.stats
    rates = {name: rate(getattr(stats, name), None if old is None else getattr(old, name)) for name in COUNTED}
    tiers = []
    for name in dict.fromkeys([*(place.tier for place in stats.places), *stats.traffic]):
        counts = stats.traffic.get(name, NO_COUNTS)
        earlier = None if old is None else old.traffic.get(name, NO_COUNTS)
        tiers.append(
            TierLine(
                name=name,
                places=tuple(place for place in stats.places if place.tier == name),
                rates={
                    one: rate(count, None if earlier is None else earlier.get(one, 0)) for one, count in counts.items()
                },
                counts=counts,
            )
        )
    outcomes = {}
    if now.insight is not None:
        former = None if before is None or before.insight is None else before.insight.outcomes
        outcomes = {
            name: rate(count, None if former is None else former.get(name, 0))
            for name, count in now.insight.outcomes.items()
        }
    return View(stats=stats, rates=rates, tiers=tuple(tiers), insight=now.insight, outcomes=outcomes, prices=prices)


def as_row(sample: Sample, view: View | None) -> dict[str, Any]:
    """Returns a row for `--json`: what was told, rates, and the worth of other amounts of memory."""
    if sample.stats is None or view is None:
        return {"up": False, "fault": sample.fault}
    stats = sample.stats
    return {
        "up": True,
        "memory": {
            "capacity_bytes": stats.capacity_bytes,
            "ready_bytes": stats.ready_bytes,
            "reason": stats.memory_reason,
            "given_back_bytes": stats.given_back_bytes,
            "used_bytes": stats.used_bytes,
            "blocks": stats.readable,
            "reserved": stats.reserved,
            "leases": stats.leases,
            "quarantined": stats.quarantined,
        },
        "sessions": stats.sessions,
        "namespaces": stats.namespaces,
        "totals": {name: getattr(stats, name) for name in COUNTED},
        "per_second": dict(view.rates),
        "hit_rate": view.hit_rate,
        "prompts": None if view.insight is None else _describe_prompts(view.insight, view.outcomes),
        "errors": {} if view.insight is None else dict(view.insight.errors),
        "engines": [] if sample.survey is None else sample.survey.list_kinds(),
        "differing": [] if sample.survey is None else list(sample.survey.find_differing()),
        "models": [] if view.insight is None else [vars(model) for model in view.insight.models],
        "calls": [] if view.insight is None else [_describe_calls(timing) for timing in view.insight.timings],
        "memory_worth": None if view.worth is None else view.worth.describe(),
        "ledger": {} if view.insight is None else _describe_ledger(view.insight, view.prices),
        "tenants": [
            {"name": one.name, "used_bytes": one.used_bytes, "quota_bytes": one.quota_bytes} for one in stats.tenants
        ],
        "tiers": [
            {
                "name": tier.name,
                "state": tier.state,
                "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity_bytes,
                "coded_ratio": tier.coded_ratio,
                "coded_share": tier.coded_share,
                "reads_bytes_per_s": None if view.insight is None else view.insight.speeds.get(tier.name),
                "totals": dict(tier.counts),
                "per_second": dict(tier.rates),
            }
            for tier in view.tiers
        ],
    }


def _describe_prompts(insight: ServerInsight, per_second: Mapping[str, float]) -> dict[str, Any]:
    return {
        "totals": dict(insight.outcomes),
        "per_second": dict(per_second),
        "hit_rate": insight.hit_rate,
        "hit_ceiling": insight.told_ceiling,
        "hit_rate_by_memory": {f"{memory:g}": share for memory, share in insight.curve.hit_rates.items()},
        "asked_blocks": insight.asked_blocks,
        "distinct_blocks": insight.distinct_blocks,
        "saved_seconds": insight.saved_s,
    }


def _describe_ledger(insight: ServerInsight, prices: Prices) -> dict[str, Any]:
    """Describes the rows of tenants and models that saved most, with the rest of each, if all rows fit."""
    return {f"{kind.label}s": list_rows(insight, kind, prices)[:LEDGER_ROWS] for kind in LedgerKind}


def _describe_calls(timing: TimedCalls) -> dict[str, Any]:
    return {
        "name": timing.name,
        "label": timing.label,
        "count": timing.count,
        "mean_s": timing.sum_s / timing.count if timing.count else None,
        "p99_s": timing.bound(0.99, _BOUNDS_S.get(timing.name, ())),
    }
