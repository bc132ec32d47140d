"""The worth of hits: arithmetic that a reader can repeat by hand."""

from __future__ import annotations

import pytest

from kvoffload.cache.benefit import BenefitSettings, PrefillCost, TraceSpan, parse_prefill_cost, reckon_benefit
from kvoffload.cache.trace import TraceRequest
from kvoffload.errors import ConfigError

SETTINGS = BenefitSettings(token_bytes=1000, block_tokens=16, prefill=100.0, hour_price=3.0)


def watched(*seconds: float) -> TraceSpan:
    span = TraceSpan()
    requests = [TraceRequest(timestamp_ms=1000 * at, input_length=160, output_length=1, hash_ids=()) for at in seconds]
    assert list(span.watch(requests)) == requests, "they pass unchanged"
    return span


def test_what_is_spared_is_time_accelerators_and_money() -> None:
    span = watched(5, 7, 15)
    benefit = reckon_benefit(SETTINGS, span, pool_blocks=100, hits=25, own_hits=5)
    assert (span.tokens, span.seconds) == (480, 10)
    assert benefit.pool_bytes == 100 * 16 * 1000
    assert benefit.spared_tokens == 20 * 16
    assert benefit.spared_share == pytest.approx(320 / 480)
    assert benefit.spared_s == pytest.approx(3.2)
    assert benefit.accelerators == pytest.approx(0.32)
    assert benefit.hour_price == pytest.approx(0.96)


def test_a_pool_smaller_than_the_engines_own_caches_spares_nothing() -> None:
    assert reckon_benefit(SETTINGS, watched(0, 1), pool_blocks=1, hits=3, own_hits=9).spared_s == 0


def test_a_trace_of_one_instant_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="at one time"):
        reckon_benefit(SETTINGS, watched(4, 4), pool_blocks=1, hits=1, own_hits=0)


def test_memory_is_a_share_of_all_blocks_and_never_more_than_all() -> None:
    assert SETTINGS.share_of(16_000 * 25, 100) == pytest.approx(25)
    assert SETTINGS.share_of(16_000 * 200, 100) == 100
    with pytest.raises(ConfigError, match="hold no block"):
        SETTINGS.share_of(15_999, 100)


def test_a_token_costs_more_the_later_it_is() -> None:
    """Of one prompt of 2 blocks and one of 1: 300 tokens at 10 us, those before them 50 and 100 in the mean."""
    cost = PrefillCost(token_us=10.0, growth_us=2.0)
    total_s = cost.total_s(blocks=3, squares=4 + 1, block_tokens=100)
    assert total_s == pytest.approx((300 * 10 + 200 * 0.2 + 100 * 0.1) / 1e6)
    assert PrefillCost(token_us=10.0, growth_us=0.0).total_s(blocks=3, squares=5, block_tokens=100) == 0.003


def test_the_default_cost_is_that_of_the_measured_model() -> None:
    """`docs/benchmarks.md` has 207 ms for 8,192 tokens and 1,190 for 32,768."""
    assert PrefillCost().total_s(blocks=8192, squares=8192**2, block_tokens=1) == pytest.approx(0.207, rel=0.01)
    assert PrefillCost().total_s(blocks=32768, squares=32768**2, block_tokens=1) == pytest.approx(1.19, rel=0.01)


def test_prefill_costs_as_they_are_typed() -> None:
    assert parse_prefill_cost("21.6,0.9") == PrefillCost()
    assert parse_prefill_cost(" 5 ") == PrefillCost(token_us=5.0, growth_us=0.0)


@pytest.mark.parametrize("text", ["", "much", "0", "1,2,3", "-1", "1,-1", "nan", "1,inf", "1e6", "1,"])
def test_prefill_costs_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one or two numbers"):
        parse_prefill_cost(text)
