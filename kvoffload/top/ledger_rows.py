"""Rows of the ledger as plain values, with prices. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoffload.client.insight import ServerInsight
from kvoffload.config.sources import Settings
from kvoffload.protocol import LedgerKind, LedgerRow
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

    @classmethod
    def from_settings(cls, settings: Settings) -> Prices:
        return cls(computing=settings.computing_price, memory=settings.memory_price, tier=settings.tier_price)

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


def list_rows(insight: ServerInsight, kind: LedgerKind, prices: Prices = NO_PRICES) -> list[dict[str, Any]]:
    """Returns the rows of a kind, those that saved most first and the rest last."""
    rows = [row for row in insight.ledger if row.kind is kind]
    return [prices.add_to(_describe(row)) for row in sorted(rows, key=lambda row: (row.is_rest, -row.saved_us))]


def _describe(row: LedgerRow) -> dict[str, Any]:
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
