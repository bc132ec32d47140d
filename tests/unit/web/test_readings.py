"""Every metric of the catalogue that a server can fill is filled, and no other."""

from __future__ import annotations

import dataclasses

from kvoffload.cache import CacheStats
from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.exposition import expose
from kvoffload.metrics.metric import Source
from kvoffload.metrics.server_metrics import SERVER_METRICS
from kvoffload.protocol.watching import TrafficCounts
from kvoffload.web import readings
from kvoffload.web.readings import read_stats
from tests.unit.top.made_up import DISK, stats

TRAFFIC = [field.name for field in dataclasses.fields(TrafficCounts) if field.name != "tier"]


def full() -> CacheStats:
    return stats(places=(DISK,), traffic={"disk": {name: at + 1 for at, name in enumerate(TRAFFIC)}})


def test_the_catalogue_and_what_is_told_are_the_same() -> None:
    wanted = {metric.name for metric in SERVER_METRICS}
    wanted |= {metric.name for metric in ENGINE_METRICS if metric.source is Source.BOTH}
    found = list(read_stats(full()))
    assert {one.name for one in found} == wanted
    assert expose(found, is_open=False)
    keys = [(one.name, tuple(one.labels.items())) for one in found]
    assert len(keys) == len(set(keys))


def test_every_count_that_a_server_tells_is_in_some_metric() -> None:
    read = set(readings._TRAFFIC) | set(readings._DROPPED) | set(readings._UNSERVED)
    assert read == set(TRAFFIC)
    of_stats = {field.name for field in dataclasses.fields(CacheStats)}
    elsewhere = {
        "capacity_bytes",
        "used_bytes",
        "readable",
        "hits",
        "misses",
        "refused",
        "tenants",
        "places",
        "traffic",
    }
    assert set(readings._GAUGES) | elsewhere == of_stats


def test_numbers_arrive() -> None:
    found = {(one.name, *one.labels.values()): one.value for one in read_stats(full())}
    assert found["kvoffload_acquires_total", "hit"] == 100
    assert found["kvoffload_used_bytes", "memory", ""] == stats().used_bytes
    assert found["kvoffload_used_bytes", "disk", DISK.name] == DISK.used_bytes
    assert found["kvoffload_tier_ready", "disk", DISK.name] == 1
    assert found["kvoffload_tier_dropped_blocks_total", "disk", "full"] == TRAFFIC.index("dropped_full") + 1


def test_a_server_that_is_away_is_one_number() -> None:
    assert [(one.name, one.value) for one in read_stats(None)] == [("kvoffload_server_up", 0)]
