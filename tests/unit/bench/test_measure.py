"""Value and limit in turn."""

from __future__ import annotations

import pytest

from kvoffload.bench import measure
from kvoffload.bench.measure import MIN_PAIRS, measure_pair, measure_timed_pair


class FakeClock:
    """A clock that moves only when the measured code works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.log.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_both_sides_run_in_turn_and_medians_are_per_call(clock: FakeClock) -> None:
    pair = measure_pair(lambda: clock.work("a", 0.02), lambda: clock.work("b", 0.01))
    assert clock.log == ["a", "b"] * (1 + MIN_PAIRS)
    assert (pair.value_s, pair.limit_s) == (pytest.approx(0.02), pytest.approx(0.01))
    assert pair.spread == pytest.approx(0.0, abs=1e-6)


def test_a_short_call_is_repeated_until_the_clock_can_see_it(clock: FakeClock) -> None:
    pair = measure_pair(lambda: clock.work("a", 1e-6), lambda: clock.work("b", 1e-3))
    assert pair.value_s == pytest.approx(1e-6)
    assert pair.limit_s == pytest.approx(1e-3)


def test_a_slow_machine_is_flattered_on_neither_side(clock: FakeClock) -> None:
    speed = iter([1.0] * 2 + [2.0, 2.0] * 3 + [1.0, 1.0] * 4)
    pair = measure_pair(lambda: clock.work("a", 0.02 * next(speed)), lambda: clock.work("b", 0.01 * next(speed)))
    assert pair.value_s / pair.limit_s == pytest.approx(2.0)


def test_calls_that_time_themselves_are_believed(clock: FakeClock) -> None:
    def call(name: str, seconds: float) -> float:
        clock.work(name, 100.0)
        return seconds

    pair = measure_timed_pair(lambda: call("a", 0.002), lambda: call("b", 0.001))
    assert clock.log == ["a", "b"] * (1 + MIN_PAIRS)
    assert (pair.value_s, pair.limit_s, pair.spread) == (0.002, 0.001, 0.0)
