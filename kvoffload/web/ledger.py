"""The ledger as /ledger tells it: what tenants, models and agents' sessions asked for, got and occupied. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.client.insight import ServerInsight
from kvoffload.client.inspector import describe_agent
from kvoffload.protocol import AgentSession, AgentSessions, LedgerKind, LedgerRow
from kvoffload.units import GIB, KIB

HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in the user's currency; 0: none is given."""

    computing: float = 0.0
    """Price of an hour of prefill."""
    memory: float = 0.0
    """Price of a GiB of memory for an hour."""
    tier: float = 0.0
    """Price of a GiB that slower tiers read or write."""

    def add_to(self, row: dict[str, Any]) -> dict[str, Any]:
        """Adds what the saved time was worth, and what memory and slower tiers have cost, as far as there are
        prices."""
        if self.computing:
            row["saved_price"] = row["saved_s"] / HOUR_S * self.computing
        if self.memory and "memory_byte_s" in row:
            row["memory_price"] = row["memory_byte_s"] / GIB / HOUR_S * self.memory
        if self.tier and "tier_read_bytes" in row:
            row["tier_price"] = (row["tier_read_bytes"] + row["tier_written_bytes"]) / GIB * self.tier
        return row


NO_PRICES = Prices()


def describe_ledger(
    stats: CacheStats, insight: ServerInsight, agents: AgentSessions, prices: Prices = NO_PRICES
) -> dict[str, Any]:
    """Returns rows by kind, those that saved most first and the rest last, and the server's own counts."""
    sessions = [
        *(_describe_session(one) for one in sorted(agents.sessions, key=lambda one: one.saved_us, reverse=True)),
        *(_describe_session(one) | {"name": None} for one in agents.rest),
    ]
    return {
        "total": prices.add_to(_describe_total(stats, insight)),
        "tenants": [prices.add_to(row) for row in _describe_rows(insight, LedgerKind.TENANT)],
        "models": [prices.add_to(row) for row in _describe_rows(insight, LedgerKind.MODEL)],
        "sessions": [prices.add_to(row) for row in sessions],
    }


def _describe_total(stats: CacheStats, insight: ServerInsight) -> dict[str, Any]:
    hits = {name: insight.outcomes.get(name, 0) for name in ("hit_memory", "hit_lower")}
    tiers = {
        name: {
            "byte_s": insight.occupied_byte_s.get(name, 0),
            "read_bytes": counts.get("promoted_bytes", 0),
            "written_bytes": counts.get("written_bytes", 0),
        }
        for name, counts in stats.traffic.items()
    }
    return {
        "asked_tokens": sum(insight.outcomes.values()),
        "hit_tokens": sum(hits.values()),
        "from_tiers": hits["hit_lower"],
        "saved_s": insight.saved_s,
        "memory_byte_s": insight.occupied_byte_s.get("memory", 0),
        "tier_read_bytes": sum(tier["read_bytes"] for tier in tiers.values()),
        "tier_written_bytes": sum(tier["written_bytes"] for tier in tiers.values()),
        "tiers": tiers,
    }


def _describe_rows(insight: ServerInsight, kind: LedgerKind) -> list[dict[str, Any]]:
    rows = [row for row in insight.ledger if row.kind is kind]
    return [_describe_row(row) for row in sorted(rows, key=lambda row: (row.is_rest, -row.saved_us))]


def _describe_row(row: LedgerRow) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": None if row.is_rest else row.name,
        "prompts": row.prompts,
        "asked_tokens": row.asked,
        "hit_tokens": row.promised,
        "from_tiers": row.lower,
        "saved_s": row.saved_us / 1e6,
        "read_bytes": row.read_bytes,
        "written_bytes": row.written_bytes,
        "memory_byte_s": row.memory_kib_s * KIB,
    }
    if row.kind is LedgerKind.MODEL:
        told |= {"tier_read_bytes": row.tier_read_bytes, "tier_written_bytes": row.tier_written_bytes}
    return told


def _describe_session(session: AgentSession) -> dict[str, Any]:
    told = describe_agent(session)
    return {"name": told.pop("session"), "prompts": told.pop("turns"), **told}
