"""What hits are worth: arithmetic that a reader can do again by hand."""

from __future__ import annotations

import pytest

from kvoffload.cache.benefit import BenefitTerms, TraceSpan, reckon_benefit
from kvoffload.cache.trace import TraceRequest
from kvoffload.errors import ConfigError

TERMS = BenefitTerms(token_bytes=1000, block_tokens=16, prefill=100.0, hour_price=3.0)


def watched(*seconds: float) -> TraceSpan:
    span = TraceSpan()
    requests = [TraceRequest(timestamp_ms=1000 * at, input_length=160, output_length=1, hash_ids=()) for at in seconds]
    assert list(span.watch(requests)) == requests, "they pass unchanged"
    return span


def test_what_is_spared_is_time_accelerators_and_money() -> None:
    span = watched(5, 7, 15)
    benefit = reckon_benefit(TERMS, span, pool_blocks=100, hits=25, own_hits=5)
    assert (span.tokens, span.seconds) == (480, 10)
    assert benefit.pool_bytes == 100 * 16 * 1000
    assert benefit.spared_tokens == 20 * 16
    assert benefit.spared_share == pytest.approx(320 / 480)
    assert benefit.spared_s == pytest.approx(3.2)
    assert benefit.accelerators == pytest.approx(0.32)
    assert benefit.hour_price == pytest.approx(0.96)


def test_a_pool_smaller_than_the_engines_own_caches_spares_nothing() -> None:
    assert reckon_benefit(TERMS, watched(0, 1), pool_blocks=1, hits=3, own_hits=9).spared_s == 0


def test_a_trace_of_one_instant_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="at one time"):
        reckon_benefit(TERMS, watched(4, 4), pool_blocks=1, hits=1, own_hits=0)


def test_memory_is_a_share_of_all_blocks_and_never_more_than_all() -> None:
    assert TERMS.share_of(16_000 * 25, 100) == pytest.approx(25)
    assert TERMS.share_of(16_000 * 200, 100) == 100
    with pytest.raises(ConfigError, match="hold no block"):
        TERMS.share_of(15_999, 100)
