"""How soon the server's policy serves what the best of the others does after the traffic has become another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvoffload import native

WINDOWS = 10
"""The requests after the shift are cut into so many windows."""
NEAR_POINTS = 1.0
"""A window counts as near where the server's policy is no further below the best of the others."""


@dataclass(frozen=True, kw_only=True)
class AfterShift:
    """One capacity: hit rates in per cent, by policy and window from the shift to the end of the trace."""

    rates: dict[str, list[float]]
    window_percent: float
    """Such a share of the trace's requests is in a window."""

    def above_best(self, policy: str) -> list[float]:
        """Returns by how many points the policy is above the best of the others in each window."""
        others = zip(*(rates for other, rates in self.rates.items() if other != policy), strict=True)
        return [rate - max(best) for rate, best in zip(self.rates[policy], others, strict=True)]

    def near_after_percent(self, policy: str) -> float:
        """Returns the share of the trace after the shift before the policy is near in two windows in a row."""
        near = [points >= -NEAR_POINTS for points in self.above_best(policy)]
        first = next((at for at, both in enumerate(pairwise(near)) if all(both)), len(near))
        return self.window_percent * first


def compare_after_shift(beginnings: Sequence[native.ReplayTrace], *, capacity: int, is_hybrid: bool) -> AfterShift:
    """Replays ever longer beginnings of a trace, from the one that ends at its shift to the whole of it."""
    rates: dict[str, list[float]] = {}
    for policy in native.policy_names():
        hits = [native.replay_policy(trace, policy, capacity, is_hybrid)["hits"] for trace in beginnings]
        references = [trace.reference_count for trace in beginnings]
        rates[policy] = [
            100 * (after - before) / (until - since)
            for (before, after), (since, until) in zip(pairwise(hits), pairwise(references), strict=True)
        ]
    shifted_at, whole = beginnings[0].request_count, beginnings[-1].request_count
    return AfterShift(rates=rates, window_percent=100 * (whole - shifted_at) / whole / (len(beginnings) - 1))
