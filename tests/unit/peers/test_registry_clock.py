"""A registry's clock that goes on, and one that is set."""

from __future__ import annotations

import pytest

from kvoffload.peers.registry_clock import RegistryClock

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("went_ms", "took_s", "set_by_ms"),
    [
        (5_000, 0.0, 0),
        (5_900, 0.0, 0),
        (4_100, 0.0, 0),
        (5_000 + 2 * HOUR_MS, 0.0, 2 * HOUR_MS),
        (5_000 - 2 * HOUR_MS, 0.0, -2 * HOUR_MS),
        (7_500, 0.0, 2_500),
        # An answer that was on its way for three seconds says that much less.
        (7_500, 3.0, 0),
        (2_500, 3.0, -2_500),
        (12_500, 3.0, 4_500),
    ],
)
def test_a_clock_that_was_set_is_told_from_one_that_goes_on(went_ms: int, took_s: float, set_by_ms: int) -> None:
    clock = RegistryClock()
    assert clock.read(1_000_000, asked_s=50.0, answered_s=50.0) == 0
    assert clock.read(1_000_000 + went_ms, asked_s=55.0, answered_s=55.0 + took_s) == set_by_ms


def test_each_setting_is_told_once() -> None:
    clock = RegistryClock()
    now_s, told = 0.0, []
    for offset_ms in (0, 0, 2 * HOUR_MS, 2 * HOUR_MS, 0, 0):
        now_s += 5
        told.append(clock.read(int(now_s * 1000) + offset_ms, asked_s=now_s, answered_s=now_s))
    assert told == [0, 0, 2 * HOUR_MS, 0, -2 * HOUR_MS, 0]


def test_a_clock_that_runs_a_little_fast_for_long_was_not_set() -> None:
    """While a registry cannot be read, hours may pass between two readings."""
    clock = RegistryClock()
    clock.read(0, asked_s=0.0, answered_s=0.0)
    assert clock.read(12 * HOUR_MS + 20_000, asked_s=12 * 3600.0, answered_s=12 * 3600.0) == 0
