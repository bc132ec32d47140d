"""The worth of more and less memory: from hits to seconds, money and a sentence, and what cannot be known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.client.insight import HitWindow
from kvoffload.top.ledger_rows import Prices
from kvoffload.top.memory_worth import MEMORIES, MemoryWorth, SizeWorth, find_worth, read_curve, tell
from kvoffload.units import GIB
from tests.kit.top.made_up import INSIGHT, stats

EXACT = replace(INSIGHT, curve=replace(INSIGHT.curve, one_in=1))
"""Every block is followed."""


def window(**changes: Any) -> HitWindow:
    return replace(INSIGHT.window, **changes)


def by_memory(worth: MemoryWorth) -> dict[float, SizeWorth]:
    return {one.memory: one for one in worth.sizes}


def test_seconds_follow_the_hits() -> None:
    found = by_memory(find_worth(stats(), EXACT))
    assert tuple(found) == MEMORIES
    # 20,000 blocks saved 7,200 s.
    # Half a point of the 40,000 blocks asked for are 200.
    assert (found[2.0].saved_s, found[2.0].error_s) == pytest.approx((3600.0, 72.0))
    assert (found[0.5].saved_s, found[0.5].error_s) == pytest.approx((-3600.0, 72.0))
    assert (found[2.0].added_bytes, found[0.75].added_bytes) == (16 * GIB, -4 * GIB)
    seconds = [one.saved_s for one in found.values()]
    assert seconds == sorted(seconds)
    assert all(found[memory].error_s > 72.0 for memory in (1.25, 1.5))


def test_the_smaller_the_sample_the_larger_the_error() -> None:
    errors = [
        by_memory(find_worth(stats(), replace(EXACT, curve=replace(INSIGHT.curve, one_in=one_in))))[2.0].error_s
        for one_in in (1, 2, 8, 32)
    ]
    assert errors == sorted(set(errors))


def test_no_more_hits_in_a_sample_is_not_known_for_sure() -> None:
    flat = window(hit_blocks=dict.fromkeys((0.25, 0.5, 1.0, 2.0, 4.0), 20_000))
    for one in find_worth(stats(), replace(INSIGHT, window=flat)).sizes:
        assert one.saved_s == 0
        assert one.error_s > 0


@pytest.mark.parametrize("memory", [0.75, 1.25, 1.5])
@pytest.mark.parametrize("power", [0.3, 0.7, 1.0, 1.6])
def test_a_curve_that_bends_one_way_is_between_its_bounds(memory: float, power: float) -> None:
    hits = {at: round(1000 * at**power) for at in (0.25, 0.5, 1.0, 2.0, 4.0)}
    found, error = read_curve(hits, memory)
    assert abs(found - 1000 * memory**power) <= error + 1
    assert error < abs(hits[2.0] - hits[0.5]) / 4


def test_a_step_lies_anywhere_between_two_points() -> None:
    hits = {0.25: 0, 0.5: 0, 1.0: 0, 2.0: 100, 4.0: 100}
    found, error = read_curve(hits, 1.25)
    assert found - error <= 0
    assert found + error >= 100
    assert read_curve(hits, 2.0) == (100.0, 0.0)


def test_money_is_less_the_price_of_the_memory() -> None:
    found = by_memory(find_worth(stats(), EXACT, Prices(computing=10.0, memory=0.01)))
    assert found[2.0].price == pytest.approx(10 - 16 * 24 * 0.01)
    assert found[0.5].price == pytest.approx(-10 + 8 * 24 * 0.01)
    assert find_worth(stats(), EXACT, Prices(memory=0.01)).sizes[0].price is None


@pytest.mark.parametrize(
    ("prices", "wanted"),
    [
        (Prices(computing=10.0, memory=0.001), 16 * GIB),
        (Prices(computing=10.0, memory=0.1), -8 * GIB),
        (Prices(computing=10.0, memory=0.04), 0),
        (Prices(computing=10.0), None),
        (Prices(memory=1.0), None),
    ],
)
def test_memory_is_wanted_where_it_surely_pays(prices: Prices, wanted: int | None) -> None:
    assert find_worth(stats(), EXACT, prices).wanted_bytes == wanted


def test_what_may_be_wrong_is_not_wanted() -> None:
    size = SizeWorth(memory=2.0, added_bytes=GIB, saved_s=10.0, error_s=9.0, price=10.0, price_error=9.0)
    assert MemoryWorth(span_s=1.0, sizes=(size,), has_prices=True).wanted_bytes == GIB
    unsure = replace(size, price_error=11.0)
    assert MemoryWorth(span_s=1.0, sizes=(unsure,), has_prices=True).wanted_bytes == 0


def test_where_slower_tiers_bring_what_was_evicted_more_memory_saves_less() -> None:
    """Of three blocks that memory did not have any more, tiers had two."""
    both = replace(EXACT, window=window(saved_s=9600.0, hit_lower=200, evicted=100))
    found = by_memory(find_worth(stats(), both))[2.0]
    assert found.saved_s + found.error_s == pytest.approx(3600.0 + 48.0)
    assert found.saved_s - found.error_s == pytest.approx(1200.0 - 48.0)


@pytest.mark.parametrize(
    ("changes", "ready_bytes", "why"),
    [
        ({"window": HitWindow()}, 16 * GIB, "in the first minute"),
        ({"window": HitWindow(span_s=60.0)}, 16 * GIB, "nothing was asked for"),
        ({"window": window(has_other_groups=True)}, 16 * GIB, "windows or recurrent states"),
        ({}, 8 * GIB, "smaller than its full size"),
        ({"window": window(hit_blocks={1.0: 0, 2.0: 5})}, 16 * GIB, "no hit in memory"),
        ({"window": window(saved_s=0.0)}, 16 * GIB, "no hit in memory"),
    ],
)
def test_what_cannot_be_known_says_why(changes: dict[str, Any], ready_bytes: int, why: str) -> None:
    worth = find_worth(stats(ready_bytes=ready_bytes), replace(INSIGHT, **changes), Prices(computing=1, memory=1))
    assert why in worth.unknown
    assert (worth.sizes, worth.wanted_bytes, worth.describe()["sizes"]) == ((), None, [])


def test_sentences_name_the_size_the_time_and_how_sure_they_are() -> None:
    size = SizeWorth(memory=1.5, added_bytes=128 * GIB, saved_s=11 * 3600.0, error_s=2 * 3600.0)
    assert tell(size, 86400.0) == "128 GiB more would have saved 11 hours of prefill in the last 24 hours (±2)"
    less = replace(size, added_bytes=-64 * GIB, saved_s=-200.0, error_s=12.0, price=-1.5, price_error=0.25)
    assert tell(less, 1800.0) == (
        "64 GiB less would have cost 3.3 minutes of prefill in the last 30 minutes (±0.2); "
        "in money -1.50 (±0.25), less the price of the memory"
    )
    assert "512 MiB more" in tell(replace(size, added_bytes=GIB // 2), 1.0)
    assert math.isclose(find_worth(stats(), EXACT).describe()["sizes"][-1]["saved_s"], 3600.0)


def test_a_loss_of_less_than_a_millisecond_is_no_negative_zero() -> None:
    size = SizeWorth(memory=0.5, added_bytes=-GIB, saved_s=-0.0001, error_s=0.0)
    (told,) = MemoryWorth(span_s=1.0, sizes=(size,)).describe()["sizes"]
    assert str(told["saved_s"]) == "0.0"
