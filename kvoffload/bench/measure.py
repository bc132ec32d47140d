"""Value and limit measured in turn, A B A B, so that a machine whose speed drifts does not flatter either."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_PAIRS = 7
MIN_SAMPLE_S = 0.005
MAX_CALLS = 1 << 20


@dataclass(frozen=True)
class Pair:
    """Medians of both sides in seconds per call, and how far the pairs' ratios spread."""

    value_s: float
    limit_s: float
    spread: float


def measure_pair(value: Callable[[], object], limit: Callable[[], object], *, pairs: int = MIN_PAIRS) -> Pair:
    """Run both once unmeasured, then in turn. Each sample repeats its call until it lasts MIN_SAMPLE_S."""
    assert pairs >= MIN_PAIRS
    value_calls, limit_calls = calls_per_sample(value), calls_per_sample(limit)
    values, limits = [], []
    for _ in range(pairs):
        values.append(time_calls(value, value_calls))
        limits.append(time_calls(limit, limit_calls))
    return summarize_pairs(values, limits)


def measure_timed_pair(value: Callable[[], float], limit: Callable[[], float], *, pairs: int = MIN_PAIRS) -> Pair:
    """The same for calls that return their own seconds, as not all they do is meant. Each call is a sample."""
    assert pairs >= MIN_PAIRS
    value(), limit()
    samples = [(value(), limit()) for _ in range(pairs)]
    return summarize_pairs([a for a, _ in samples], [b for _, b in samples])


def summarize_pairs(values: list[float], limits: list[float]) -> Pair:
    """Summarizes samples that were measured in turn, one number of each side a turn."""
    ratios = [a / b for a, b in zip(values, limits, strict=True)]
    return Pair(statistics.median(values), statistics.median(limits), spread_of(ratios))


def spread_of(samples: list[float]) -> float:
    """Width of the middle half, as a share of the median; at least two samples."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle


def calls_per_sample(call: Callable[[], object]) -> int:
    """How many calls make a sample long enough for the clock; warms the call up on the way."""
    calls = 1
    while calls < MAX_CALLS and time_calls(call, calls) * calls < MIN_SAMPLE_S:
        calls *= 2
    return calls


def time_calls(call: Callable[[], object], calls: int) -> float:
    """Returns the seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
