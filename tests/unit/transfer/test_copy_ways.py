"""The table of ways: the fastest where it was measured, and the nearest measurement everywhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import (
    HAS_TO_BE_FASTER_BY,
    NO_LIMIT,
    CopyWay,
    WayRule,
    WayTable,
    WayTiming,
    choose_ways,
    fastest,
)

SAVE, LOAD = CopyDirection.SAVE, CopyDirection.LOAD


def timing(run_bytes: int, runs: int, way: CopyWay, seconds: float, direction: CopyDirection = SAVE) -> WayTiming:
    return WayTiming(direction=direction, run_bytes=run_bytes, runs=runs, way=way, seconds=seconds)


def apply(table: WayTable, direction: CopyDirection, run_bytes: int, runs: int) -> CopyWay:
    """Applies a table as the native core does."""
    for rule in table:
        if rule.direction is direction and run_bytes <= rule.run_bytes and runs <= rule.runs:
            return rule.way
    return CopyWay.BATCH


def test_without_timings_there_are_no_rules() -> None:
    assert choose_ways([]) == ()


def test_a_rule_reaches_half_way_to_the_next_size_and_count() -> None:
    table = choose_ways(
        [
            timing(4096, 10, CopyWay.BATCH, 2.0),
            timing(4096, 10, CopyWay.STAGED, 1.0),
            timing(4096, 1000, CopyWay.MAPPED, 1.0),
            timing(65536, 10, CopyWay.BATCH, 1.0),
        ]
    )
    assert table == (
        WayRule(direction=SAVE, run_bytes=16384, runs=100, way=CopyWay.STAGED),
        WayRule(direction=SAVE, run_bytes=16384, runs=NO_LIMIT, way=CopyWay.MAPPED),
        WayRule(direction=SAVE, run_bytes=NO_LIMIT, runs=NO_LIMIT, way=CopyWay.BATCH),
    )
    assert apply(table, SAVE, 16384, 100) is CopyWay.STAGED
    assert apply(table, SAVE, 1, 101) is CopyWay.MAPPED
    assert apply(table, SAVE, 16385, 1) is CopyWay.BATCH
    assert apply(table, LOAD, 4096, 10) is CopyWay.BATCH


@pytest.mark.parametrize("way", [CopyWay.STAGED, CopyWay.MAPPED])
def test_a_way_that_takes_from_the_model_has_to_be_worth_it(way: CopyWay) -> None:
    margin = HAS_TO_BE_FASTER_BY[way]
    batch = timing(4096, 10, CopyWay.BATCH, 1.0)
    assert fastest([batch, timing(4096, 10, way, 0.99 / margin)]).way is way
    assert fastest([batch, timing(4096, 10, way, 1.01 / margin)]).way is CopyWay.BATCH


timings = st.builds(
    timing,
    st.sampled_from([512, 4096, 20_000, 1 << 20]),
    st.sampled_from([1, 8, 300]),
    st.sampled_from(CopyWay),
    st.floats(1e-6, 10),
    st.sampled_from(CopyDirection),
)


@given(st.lists(timings, max_size=30))
def test_what_was_measured_gets_the_way_that_won(measured: list[WayTiming]) -> None:
    table = choose_ways(measured)
    for one in measured:
        plan = (one.direction, one.run_bytes, one.runs)
        same = [other for other in measured if (other.direction, other.run_bytes, other.runs) == plan]
        assert apply(table, *plan) is fastest(same).way


def test_speed_is_bytes_by_time() -> None:
    assert timing(1000, 50, CopyWay.BATCH, 0.5).bytes_per_s == 100_000
