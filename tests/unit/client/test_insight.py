"""A server's `insight` becomes plain values."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.cache import CurvePoint, MemoryCurve
from kvoffload.client.insight import HitWindow, TimedCalls, read_insight, read_stats
from kvoffload.errors import ServerError
from kvoffload.protocol import Error, ErrorCode, Insight, MemorySize, NamedCount, Timing
from tests.kit.top.made_up import INSIGHT


def test_a_message_is_read_as_it_was_meant() -> None:
    timing = Timing(name="call", label="acquire", counts=np.array([1, 2], "<u8").tobytes(), sum_ns=1_500_000_000)
    message = Insight(
        outcomes=(NamedCount(name="hit_memory", count=30), NamedCount(name="evicted", count=10)),
        errors=(NamedCount(name="busy", count=1),),
        timings=(timing,),
        asked_blocks=10,
        distinct_blocks=4,
        saved_us=2_500_000,
        memory_kib_s=3,
        tier_kib_s=(NamedCount(name="disk", count=5),),
    )
    found = read_insight(message)
    assert found.occupied_byte_s == {"memory": 3072, "disk": 5120}
    assert found.timings == (TimedCalls(name="call", label="acquire", counts=(1, 2), sum_s=1.5),)
    assert (found.outcomes, found.errors, found.saved_s) == ({"hit_memory": 30, "evicted": 10}, {"busy": 1}, 2.5)
    assert (found.hit_rate, found.ceiling) == (0.75, pytest.approx(0.6))


def test_the_memory_curve_has_multiples_of_the_memory_and_shares() -> None:
    message = Insight(
        outcomes=(),
        errors=(),
        timings=(),
        asked_blocks=0,
        distinct_blocks=0,
        saved_us=0,
        curve_blocks=200,
        curve_bytes=2000,
        curve_one_in=4,
        curve=(
            MemorySize(quarters=2, hit_blocks=50, hit_bytes=400),
            MemorySize(quarters=16, hit_blocks=150, hit_bytes=1500),
        ),
    )
    curve = read_insight(message).curve
    assert curve == MemoryCurve(
        asked_blocks=200,
        asked_bytes=2000,
        one_in=4,
        points=(
            CurvePoint(memory=0.5, hit_blocks=50, hit_bytes=400),
            CurvePoint(memory=4.0, hit_blocks=150, hit_bytes=1500),
        ),
    )
    assert curve.hit_rates == {0.5: 0.25, 4.0: 0.75}


def test_the_window_has_the_curves_multiples_of_the_memory() -> None:
    message = Insight(
        outcomes=(),
        errors=(),
        timings=(),
        asked_blocks=0,
        distinct_blocks=0,
        saved_us=0,
        curve=(MemorySize(quarters=2, hit_blocks=9, hit_bytes=9), MemorySize(quarters=4, hit_blocks=9, hit_bytes=9)),
        window_s=60,
        window_saved_us=1_500_000,
        window_hit_memory=5,
        window_evicted=3,
        window_blocks=20,
        window_hits=(2, 4),
        window_has_other_groups=True,
    )
    assert read_insight(message).window == HitWindow(
        span_s=60.0,
        saved_s=1.5,
        hit_memory=5,
        evicted=3,
        asked_blocks=20,
        hit_blocks={0.5: 2, 1.0: 4},
        has_other_groups=True,
    )


def test_a_curve_of_nothing_has_no_rates() -> None:
    assert MemoryCurve(points=(CurvePoint(memory=1.0, hit_blocks=0, hit_bytes=0),)).hit_rates == {}


def test_a_rate_of_nothing_is_none() -> None:
    nothing = read_insight(Insight(outcomes=(), errors=(), timings=(), asked_blocks=0, distinct_blocks=0, saved_us=0))
    assert (nothing.hit_rate, nothing.ceiling) == (None, None)


def test_an_estimate_that_is_too_high_is_no_negative_ceiling() -> None:
    assert (
        read_insight(
            Insight(outcomes=(), errors=(), timings=(), asked_blocks=100, distinct_blocks=101, saved_us=0)
        ).ceiling
        == 0.0
    )
    assert INSIGHT.ceiling == 0.75


def test_without_counts_there_is_a_reason() -> None:
    with pytest.raises(ServerError, match="counts: not yet"):
        read_stats(Error(code=ErrorCode.BUSY, message="not yet"))
    with pytest.raises(ServerError, match="counts: the cache server did not answer in time"):
        read_stats(None)


def test_after_an_adoption_no_ceiling_is_told_until_it_is_one() -> None:
    """Each block was asked for once since the new server began, and is there from the server before it."""
    counts = (NamedCount(name="hit_memory", count=90), NamedCount(name="never_seen", count=10))
    told = Insight(outcomes=counts, errors=(), timings=(), asked_blocks=100, distinct_blocks=100, saved_us=0)
    assert read_insight(told).told_ceiling is None
    assert INSIGHT.told_ceiling == INSIGHT.ceiling
