"""The ledger as /ledger tells it: what tenants, models and agents' sessions asked for, got and occupied. Pure."""

from __future__ import annotations

from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.client.insight import ServerInsight
from kvoffload.client.inspector import describe_agent
from kvoffload.protocol import AgentSession, AgentSessions, LedgerKind
from kvoffload.top.ledger_rows import NO_PRICES, Prices, list_rows


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
        "tenants": list_rows(insight, LedgerKind.TENANT, prices),
        "models": list_rows(insight, LedgerKind.MODEL, prices),
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


def _describe_session(session: AgentSession) -> dict[str, Any]:
    told = describe_agent(session)
    return {"name": told.pop("session"), "prompts": told.pop("turns"), **told}
