"""The ledger as /ledger tells it: what tenants, models and agents' sessions asked for, got and occupied. Pure."""

from __future__ import annotations

from typing import Any

from kvoffload.cache import CacheStats
from kvoffload.client.insight import ServerInsight
from kvoffload.client.inspector import describe_agent
from kvoffload.protocol import AgentSession, AgentSessions, LedgerKind, LedgerRow
from kvoffload.units import KIB


def describe_ledger(stats: CacheStats, insight: ServerInsight, agents: AgentSessions) -> dict[str, Any]:
    """Returns rows by kind, those that saved most first and the rest last, and the server's own counts."""
    return {
        "total": _describe_total(stats, insight),
        "tenants": _describe_rows(insight, LedgerKind.TENANT),
        "models": _describe_rows(insight, LedgerKind.MODEL),
        "sessions": [
            *(_describe_session(one) for one in sorted(agents.sessions, key=lambda one: one.saved_us, reverse=True)),
            *(_describe_session(one) | {"name": None} for one in agents.rest),
        ],
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
