"""Rates between two samples, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.top.ledger_rows import Prices
from kvoffload.top.samples import LEDGER_ROWS, Sample, as_row, compare
from tests.kit.top.made_up import DIFFERING, DISK, INSIGHT, LEDGER, stats


def test_rates_are_of_the_time_in_between() -> None:
    before = Sample(time_s=10.0, stats=stats(traffic={"disk": {"written": 5}}))
    now = Sample(
        time_s=12.0, stats=stats(hits=160, misses=70, places=(DISK,), traffic={"disk": {"written": 9, "late": 2}})
    )
    view = compare(before, now)
    assert view is not None
    assert view.rates == {"hits": 30.0, "misses": 10.0, "refused": 0.0, "evicted": 0.0, "duplicates": 0.0}
    assert view.hit_rate == 0.75
    assert view.fill == 0.25
    [disk] = view.tiers
    assert (disk.name, disk.state, disk.rates) == ("disk", "ready", {"written": 2.0, "late": 1.0})


@pytest.mark.parametrize("before", [None, Sample(time_s=12.0, stats=stats()), Sample(time_s=9.0, stats=None)])
def test_with_nothing_to_compare_rates_are_none(before: Sample | None) -> None:
    view = compare(before, Sample(time_s=12.0, stats=stats(traffic={"s3": {"written": 3}})))
    assert view is not None
    assert set(view.rates.values()) == {0.0}
    assert view.hit_rate is None
    assert view.tiers[0].rates == {"written": 0.0}


def test_a_server_that_was_started_anew_counts_from_its_beginning() -> None:
    view = compare(Sample(time_s=0.0, stats=stats(hits=1000)), Sample(time_s=2.0, stats=stats(hits=6)))
    assert view is not None
    assert view.rates["hits"] == 3.0


def test_no_answer_is_no_view() -> None:
    gone = Sample(time_s=1.0, stats=None, fault="nobody there")
    assert compare(Sample(time_s=0.0, stats=stats()), gone) is None
    assert as_row(gone, None) == {"up": False, "fault": "nobody there"}


def test_the_worst_place_is_the_tiers_state() -> None:
    bad = replace(DISK, name="/nvme1/kv", state="absent", reason="Input/output error")
    now = Sample(time_s=1.0, stats=stats(places=(DISK, bad)))
    view = compare(None, now)
    assert view is not None
    [disk] = view.tiers
    assert disk.state == "absent: Input/output error"
    assert disk.used_bytes == 2 * DISK.used_bytes
    row = as_row(now, view)
    assert row["tiers"][0]["state"] == disk.state
    assert row["memory"]["blocks"] == 1000
    assert row["totals"]["hits"] == 100
    assert row["per_second"]["hits"] == 0.0


def test_a_row_has_the_engines_that_have_joined() -> None:
    now = Sample(time_s=1.0, stats=stats(), survey=DIFFERING)
    row = as_row(now, compare(None, now))
    assert row["engines"] == [{"engine": "vllm 0.31.0", "model": "Qwen3", "sessions": 2, "processes": 2}]
    assert row["differing"] == ["Qwen3: hash_block_tokens 64 and 128"]
    refused = replace(now, survey=None)
    told = as_row(refused, compare(None, refused))
    assert (told["engines"], told["differing"]) == ([], [])


def test_a_row_has_the_worth_of_other_memory_and_those_who_saved_most() -> None:
    now = Sample(time_s=1.0, stats=stats(), insight=INSIGHT)
    row = as_row(now, compare(None, now, Prices(computing=10.0, memory=0.5)))
    worth = row["memory_worth"]
    assert (worth["span_s"], worth["unknown"]) == (86400.0, "")
    assert [one["memory"] for one in worth["sizes"]] == [0.5, 0.75, 1.25, 1.5, 2.0]
    assert worth["sizes"][-1]["sentence"].startswith("16 GiB more would have saved 1 hour of prefill")
    assert worth["sizes"][-1]["price"] == pytest.approx(10 - 16 * 24 * 0.5)
    assert [one["name"] for one in row["ledger"]["tenants"]] == ["a tenant", None]
    assert row["ledger"]["models"][0]["saved_price"] == pytest.approx(6.25 / 360)
    earlier = replace(now, insight=None)
    told = as_row(earlier, compare(None, earlier))
    assert (told["memory_worth"], told["ledger"]) == (None, {})


def test_a_row_has_few_rows_of_the_ledger() -> None:
    many = tuple(replace(LEDGER[1], name=str(at), saved_us=at) for at in range(20))
    now = Sample(time_s=1.0, stats=stats(), insight=replace(INSIGHT, ledger=many))
    told = as_row(now, compare(None, now))["ledger"]["tenants"]
    assert [one["name"] for one in told] == [str(19 - at) for at in range(LEDGER_ROWS)]
