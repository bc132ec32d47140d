"""The moving estimate of a tier's speed: of the time in which it has work, whatever lies in between."""

from __future__ import annotations

import pytest

from kvoffload.server.tiering.rate import FIRST_GUESS, TierRate


def test_until_something_is_measured_it_is_a_guess() -> None:
    rate = TierRate()
    assert not rate.is_measured
    assert rate.estimate_s(int(FIRST_GUESS)) == pytest.approx(1.0)


def test_idle_time_does_not_count() -> None:
    rate = TierRate()
    for start_s in range(0, 50, 10):
        rate.begin(1000, start_s)
        rate.end(1000, start_s + 0.5)
    assert rate.bytes_per_s == pytest.approx(2000)
    assert rate.queued_bytes == 0


def test_batches_beside_each_other_share_their_time() -> None:
    rate = TierRate()
    now_s = 0.0
    for _ in range(4):
        rate.begin(1000, now_s)
    for _ in range(40):
        now_s += 0.1
        rate.end(1000, now_s)
        rate.begin(1000, now_s)
    assert rate.bytes_per_s == pytest.approx(10_000)
    assert rate.estimate_s(1000) == pytest.approx(0.5)


def test_batches_that_end_at_once_are_not_infinitely_fast() -> None:
    rate = TierRate()
    for start_s in range(20):
        rate.begin(1000, start_s)
        rate.begin(1000, start_s)
        rate.end(1000, start_s + 1.0)
        rate.end(1000, start_s + 1.0)
    assert 1000 <= rate.bytes_per_s <= 2500


def test_it_follows_a_tier_that_slows_down_and_one_that_moves_nothing() -> None:
    rate = TierRate()
    for start_s in range(8):
        rate.begin(1000, start_s)
        rate.end(1000, start_s + 0.001)
    fast = rate.bytes_per_s
    for start_s in range(100, 116):
        rate.begin(1000, start_s)
        rate.end(1000, start_s + 0.9, moved_bytes=0)
    assert rate.bytes_per_s < fast / 1000
    assert rate.bytes_per_s >= 1.0


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    rate = TierRate()
    rate.begin(1000, 5.0)
    rate.end(1000, 5.0)
    assert rate.bytes_per_s == FIRST_GUESS
