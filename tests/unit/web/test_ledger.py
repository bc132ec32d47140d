"""The ledger has a row for each tenant, model and session, the rest last, and the server's own counts."""

from __future__ import annotations

import pytest

from kvoffload.protocol import AgentSession, AgentSessions
from kvoffload.top.ledger_rows import Prices
from kvoffload.web.ledger import describe_ledger
from tests.kit.top.made_up import DISK, INSIGHT, stats


def session(name: str, saved_us: int) -> AgentSession:
    return AgentSession(name=name, turns=2, asked=100, promised=60, lower=10, saved_us=saved_us, read_bytes=64)


AGENTS = AgentSessions(
    total=2, sessions=(session("a", 1_000_000), session("b", 2_000_000)), rest=(session("", 9_500_000),)
)


def test_each_kind_adds_up_to_the_server_and_ends_with_the_rest() -> None:
    counts = {"promoted_bytes": 2 << 20, "written_bytes": 4 << 20}
    told = describe_ledger(stats(places=(DISK,), traffic={"disk": counts}), INSIGHT, AGENTS)
    total = told["total"]
    for kind in ("tenants", "models", "sessions"):
        assert sum(row["saved_s"] for row in told[kind]) == total["saved_s"]
        assert [row["name"] for row in told[kind]].index(None) == len(told[kind]) - 1
    for kind in ("tenants", "models"):
        assert sum(row["hit_tokens"] for row in told[kind]) == total["hit_tokens"]
        assert sum(row["asked_tokens"] for row in told[kind]) == total["asked_tokens"]
        assert sum(row["memory_byte_s"] for row in told[kind]) == total["memory_byte_s"]
    assert sum(row["tier_written_bytes"] for row in told["models"]) == total["tier_written_bytes"]
    assert sum(row["tier_read_bytes"] for row in told["models"]) == total["tier_read_bytes"]
    assert total["tiers"] == {"disk": {"byte_s": 1 << 30, "read_bytes": 2 << 20, "written_bytes": 4 << 20}}


def test_prices_say_what_was_saved_and_what_it_cost() -> None:
    counts = {"promoted_bytes": 2 << 20, "written_bytes": 4 << 20}
    seen = stats(places=(DISK,), traffic={"disk": counts})
    told = describe_ledger(seen, INSIGHT, AGENTS, Prices(computing=3600.0, memory=1800.0, tier=512.0))
    assert told["total"]["saved_price"] == pytest.approx(12.5)
    assert [row["saved_price"] for row in told["tenants"]] == pytest.approx([6.25, 6.25])
    assert [row["memory_price"] for row in told["tenants"]] == pytest.approx([0.5, 0.5])
    assert told["total"]["memory_price"] == pytest.approx(1.0)
    assert [row["tier_price"] for row in told["models"]] == pytest.approx([1.5, 1.5])
    assert told["total"]["tier_price"] == pytest.approx(3.0)
    assert "tier_price" not in told["tenants"][0]
    assert "memory_price" not in told["sessions"][0]
    assert "saved_price" not in describe_ledger(seen, INSIGHT, AGENTS)["total"]


def test_what_saved_most_comes_first() -> None:
    told = describe_ledger(stats(), INSIGHT, AGENTS)["sessions"]
    assert [row["name"] for row in told] == ["b", "a", None]
    assert told[0] == {
        "name": "b",
        "prompts": 2,
        "asked_tokens": 100,
        "hit_tokens": 60,
        "from_tiers": 10,
        "saved_s": 2.0,
        "read_bytes": 64,
    }
