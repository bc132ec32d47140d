"""Rows of the ledger as they are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.config.sources import Settings
from kvoffload.protocol import LedgerKind
from kvoffload.top.ledger_rows import NO_PRICES, Prices, list_rows
from tests.kit.top.made_up import INSIGHT, LEDGER


def test_those_that_saved_most_come_first_and_the_rest_last() -> None:
    more = replace(LEDGER[1], name="another", saved_us=2 * LEDGER[1].saved_us)
    rows = list_rows(replace(INSIGHT, ledger=(*LEDGER, more)), LedgerKind.TENANT)
    assert [row["name"] for row in rows] == ["another", "a tenant", None]
    assert rows[0]["saved_s"] == 12.5


def test_tiers_are_told_of_models_alone() -> None:
    assert "tier_read_bytes" in list_rows(INSIGHT, LedgerKind.MODEL)[0]
    assert "tier_read_bytes" not in list_rows(INSIGHT, LedgerKind.TENANT)[0]


def test_prices_are_added_as_far_as_they_are_given() -> None:
    given = Settings(computing_price=3600.0, memory_price=0.0, tier_price=512.0)
    row = list_rows(INSIGHT, LedgerKind.MODEL, Prices.from_settings(given))[0]
    assert (row["saved_price"], row["tier_price"]) == pytest.approx((6.25, 1.5))
    assert "memory_price" not in row
    assert Prices.from_settings(Settings()) == NO_PRICES
