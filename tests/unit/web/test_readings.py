"""Every metric of the catalogue that a server can fill is filled, and no other."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from kvoffload.cache import CacheStats, MemoryCurve
from kvoffload.client.insight import HitWindow, TimedCalls
from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.exposition import Distribution, expose
from kvoffload.metrics.metric import Source
from kvoffload.metrics.server_metrics import SERVER_METRICS
from kvoffload.protocol.watching import TrafficCounts
from kvoffload.top.ledger_rows import Prices
from kvoffload.top.memory_worth import MEMORIES, find_worth
from kvoffload.web.readings import read_differing, read_ignored, read_insight, read_stats, read_worth
from tests.kit.top.made_up import DIFFERING, DISK, INSIGHT, stats

COUNTS = [field.name for field in dataclasses.fields(CacheStats) if isinstance(getattr(stats(), field.name), int)]
PRICES = Prices(computing=10.0, memory=0.001)
TRAFFIC = [field.name for field in dataclasses.fields(TrafficCounts) if field.name != "tier"]


def full() -> CacheStats:
    return stats(places=(DISK,), traffic={"disk": {name: at + 1 for at, name in enumerate(TRAFFIC)}})


def test_the_catalogue_and_what_is_told_are_the_same() -> None:
    wanted = {metric.name for metric in SERVER_METRICS}
    wanted |= {metric.name for metric in ENGINE_METRICS if metric.source is Source.BOTH}
    found = [
        *read_stats(full()),
        *read_insight(INSIGHT),
        *read_worth(find_worth(stats(), INSIGHT, PRICES)),
        *read_ignored({"unknown_action": 1}),
        *read_differing(DIFFERING),
    ]
    assert {one.name for one in found} == wanted
    assert expose(found, is_open=False)
    keys = [(one.name, tuple(one.labels.items())) for one in found]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", TRAFFIC)
def test_every_count_of_a_tier_that_a_server_tells_is_in_one_metric(name: str) -> None:
    found = count_changes(full(), stats(places=(DISK,), traffic={"disk": {**full().traffic["disk"], name: 1000}}))
    assert found == 1


@pytest.mark.parametrize("name", COUNTS)
def test_every_count_that_a_server_tells_is_in_one_metric(name: str) -> None:
    assert count_changes(full(), replace(full(), **{name: getattr(full(), name) + 1000})) == 1


def test_what_a_server_tells_beside_counts_is_known() -> None:
    """The first four are in metrics of their own; the others are told by `read_insight`, or for people alone."""
    others = {field.name for field in dataclasses.fields(CacheStats)} - set(COUNTS)
    assert others == {"tenants", "places", "traffic", "memory_reason", "residence"}


def count_changes(before: CacheStats, after: CacheStats) -> int:
    return sum(one != other for one, other in zip(read_stats(before), read_stats(after), strict=True))


def test_numbers_arrive() -> None:
    found = {(one.name, *one.labels.values()): one.value for one in read_stats(full())}
    assert found["kvoffload_acquires_total", "hit"] == 100
    assert found["kvoffload_used_bytes", "memory", ""] == stats().used_bytes
    assert found["kvoffload_used_bytes", "disk", DISK.name] == DISK.used_bytes
    assert found["kvoffload_tier_ready", "disk", DISK.name] == 1
    assert found["kvoffload_tier_coded_records_total", "disk", DISK.name] == DISK.coded_records
    assert found["kvoffload_tier_coded_bytes_total", "disk", DISK.name] == DISK.coded_bytes
    assert found["kvoffload_tier_coded_stored_bytes_total", "disk", DISK.name] == DISK.coded_stored_bytes
    assert found["kvoffload_tier_dropped_blocks_total", "disk", "full"] == TRAFFIC.index("dropped_full") + 1


def test_engines_that_share_no_blocks_are_counted_where_the_server_tells_them() -> None:
    assert [one.value for one in read_differing(DIFFERING)] == [1]
    assert list(read_differing(None)) == []


def test_a_server_that_is_away_is_one_number() -> None:
    assert [(one.name, one.value) for one in read_stats(None)] == [("kvoffload_server_up", 0)]


def test_histograms_arrive_as_prometheus_has_them() -> None:
    text = expose(read_insight(INSIGHT), is_open=False).decode()
    assert 'kvoffload_call_seconds_bucket{call="acquire",le="3e-06"} 5.0' in text
    assert 'kvoffload_call_seconds_bucket{call="acquire",le="1e-05"} 7.0' in text
    assert 'kvoffload_call_seconds_count{call="acquire"} 7.0' in text
    assert "kvoffload_residence_seconds_sum 20.0" in text


def test_what_a_newer_server_times_is_not_known_here() -> None:
    newer = replace(INSIGHT, timings=(TimedCalls(name="guesses", label="", counts=(1,), sum_s=1.0),))
    assert not [one for one in read_insight(newer) if isinstance(one, Distribution)]


def test_hits_with_other_memory_are_shares_by_multiples_of_it() -> None:
    text = expose(read_insight(INSIGHT), is_open=False).decode()
    assert 'kvoffload_memory_hit_ratio{memory="0.5"} 0.25' in text
    assert 'kvoffload_memory_hit_ratio{memory="1"} 0.5' in text
    nothing = expose(read_insight(replace(INSIGHT, curve=MemoryCurve())), is_open=False).decode()
    assert "kvoffload_memory_hit_ratio{" not in nothing


def test_the_worth_of_other_memory_has_one_label_with_few_values() -> None:
    found = {(one.name, *one.labels.values()): one.value for one in read_worth(find_worth(stats(), INSIGHT, PRICES))}
    assert found["kvoffload_memory_worth_seconds", "2"] == pytest.approx(3600)
    assert found["kvoffload_memory_worth_price", "2"] == pytest.approx(10 - 16 * 24 * 0.001)
    assert found["kvoffload_memory_wanted_change_bytes",] == stats().capacity_bytes
    assert {name[1] for name in found if len(name) > 1} == {f"{memory:g}" for memory in MEMORIES}


def test_worth_without_prices_is_time_alone_and_what_is_not_known_is_left_out() -> None:
    assert {one.name for one in read_worth(find_worth(stats(), INSIGHT))} == {
        *("kvoffload_memory_worth_window_seconds", "kvoffload_memory_worth_seconds"),
        "kvoffload_memory_worth_error_seconds",
    }
    assert list(read_worth(find_worth(stats(), replace(INSIGHT, window=HitWindow())))) == []


def test_without_questions_there_is_no_ceiling() -> None:
    found = {one.name: one.value for one in read_insight(INSIGHT)}
    assert found["kvoffload_hit_ceiling_ratio"] == 0.75
    assert "kvoffload_hit_ceiling_ratio" not in {one.name for one in read_insight(replace(INSIGHT, asked_blocks=0))}
