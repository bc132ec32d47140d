"""The benchmark of the arena measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.parts import arena
from benchmarks.parts.arena import ArenaBenchmark, choose_pool_bytes
from kvoffload import native
from kvoffload.errors import BenchmarkError
from kvoffload.units import GIB, MIB


def test_a_line_per_policy_phase_and_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "POOL_BYTES", 64 * MIB)
    monkeypatch.setattr(arena, "LEAST_POOL_BYTES", 64 * MIB)
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 16 * MIB)
    monkeypatch.setattr(arena, "RECORD_BYTES", (4096, 36 << 10, 100 << 10, 200_001, MIB))
    monkeypatch.setattr(arena, "PHASES", (("one mix", 3, 0.97), ("mix flipped", 2, 0.95)))
    steps: list[str] = []
    results = list(ArenaBenchmark().run(steps.append))
    policies = list(dict.fromkeys((arena.DEFAULT_POLICY, "lru")))
    assert [(row.params["policy"], row.params["phase"], row.params["seen"]) for row in results] == [
        (policy, phase, seen)
        for policy in policies
        for phase in ("one mix", "mix flipped")
        for seen in ("mean", "lowest")
    ]
    for mean, lowest in zip(results[::2], results[1::2], strict=True):
        assert 0.3 < lowest.value <= mean.value <= 1
        assert mean.params["refused"] == 0
        assert 0 <= float(mean.params["moved_share"]) < 2
        assert mean.params["pool_gib"] == 1 / 16
        assert mean.goal == lowest.goal
    assert steps


@pytest.mark.parametrize(
    ("headroom_gib", "pool_gib"), [(100, 16), (17, 16), (16.9, 8), (9, 8), (8.9, 4), (3, 2), (2, 1)]
)
def test_the_pool_is_the_largest_that_fits(headroom_gib: float, pool_gib: int) -> None:
    assert choose_pool_bytes(int(headroom_gib * GIB)) == pool_gib * GIB


@pytest.mark.parametrize("turnovers", [float("nan"), float("inf"), -1.0, 1e30])
def test_turnovers_are_a_number_that_ends(turnovers: float) -> None:
    load = native.make_turnover_load(
        pool_bytes=MIB, segment_bytes=MIB, record_bytes=[4096] * 3, byte_shares=[1.0] * 3, policy="lru", threads=1
    )
    with pytest.raises(ValueError, match="turnovers must be 0 to 1e6"):
        load.run(turnovers)


@pytest.mark.parametrize("headroom_bytes", [0, GIB, 2 * GIB - 1])
def test_too_little_memory_is_said(headroom_bytes: int) -> None:
    with pytest.raises(BenchmarkError, match="does not fit"):
        choose_pool_bytes(headroom_bytes)
