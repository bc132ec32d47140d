"""Figures recorded in any process reach vLLM's log and Prometheus unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvoffload.connector.engine import stats as engine_stats
from kvoffload.connector.engine.stats import ConnectorProm, ConnectorStats
from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.metric import Kind

LABELNAMES = ["model_name", "engine"]
BOUNDS = find_metric("kvoffload_load_seconds").buckets
SECONDS = [0.0001, 0.0003, 0.002, 0.1, 0.1, 0.1, 7.0, 90.0]
TYPES: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    yield
    engine_stats.forget_registered()


def make_prom(*, engines: int = 1) -> ConnectorProm:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return ConnectorProm(config, TYPES, LABELNAMES, {index: ["acme", str(index)] for index in range(engines)})


def scrape() -> dict[str, float]:
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("kvoffload_")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def filled() -> ConnectorStats:
    stats = ConnectorStats()
    stats.count("kvoffload_queries_total", 100)
    stats.count("kvoffload_misses_total", 30, reason="too_short")
    stats.count("kvoffload_misses_total", 6, reason="no_room")
    stats.set("kvoffload_server_up", 1)
    for seconds in SECONDS:
        stats.observe("kvoffload_load_seconds", seconds)
    return stats


def sent(stats: ConnectorStats) -> dict[str, Any]:
    """Returns stats as they arrive in a front end."""
    message = SchedulerStats(kv_connector_stats=stats.to_dict())
    arrived = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(message)).kv_connector_stats
    assert isinstance(arrived, dict)
    return arrived


def test_it_arrives_as_it_was_sent() -> None:
    assert sent(filled()) == filled().data
    assert ForkingPickler.loads(ForkingPickler.dumps(filled())) == filled()


def test_its_size_does_not_depend_on_the_load() -> None:
    stats = ConnectorStats()
    for number in range(10_000):
        stats.observe("kvoffload_load_seconds", 0.001 * number)
    assert [len(part) for part in stats.data["kvoffload_load_seconds"][""]] == [len(BOUNDS) + 1] * 2


@pytest.mark.parametrize(
    ("act", "name", "labels"),
    [
        ("count", "kvoffload_surprises_total", {}),
        ("set", "kvoffload_surprises", {}),
        ("observe", "kvoffload_surprise_seconds", {}),
        ("count", "kvoffload_misses_total", {}),
        ("count", "kvoffload_misses_total", {"tier": "memory"}),
        ("count", "kvoffload_queries_total", {"reason": "no_room"}),
    ],
)
def test_what_is_not_in_the_catalogue_is_refused(act: str, name: str, labels: dict[str, str]) -> None:
    stats = ConnectorStats()
    with pytest.raises(KeyError):
        getattr(stats, act)(name, 1, **labels)
    assert stats.is_empty()


@pytest.mark.parametrize(
    ("act", "name", "value", "labels"),
    [
        ("count", "kvoffload_server_up", 1, {}),
        ("set", "kvoffload_load_seconds", 1, {}),
        ("observe", "kvoffload_queries_total", 1, {}),
        ("count", "kvoffload_queries_total", -1, {}),
        ("count", "kvoffload_hits_total", 1, {"tier": "a,b"}),
    ],
)
def test_a_wrong_use_is_a_bug(act: str, name: str, value: float, labels: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        getattr(ConnectorStats(), act)(name, value, **labels)


def test_it_is_empty_until_something_is_recorded_and_after_a_reset() -> None:
    stats = ConnectorStats()
    stats.count("kvoffload_queries_total", 0)
    assert stats.is_empty()
    assert stats.reduce() == {}
    stats.set("kvoffload_pinned_blocks", 0)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_counters_and_histograms_add_up_and_gauges_are_the_later_ones() -> None:
    one, other = filled(), filled()
    other.set("kvoffload_server_up", 0)
    other.set("kvoffload_pinned_blocks", 4)
    other.count("kvoffload_misses_total", 5, reason="refused")
    total = one.aggregate(other)
    assert total.data["kvoffload_queries_total"] == {"": 200}
    assert total.data["kvoffload_misses_total"] == {"too_short": 60, "no_room": 12, "refused": 5}
    assert total.data["kvoffload_server_up"] == {"": 0}
    assert total.data["kvoffload_pinned_blocks"] == {"": 4}
    counts, sums = total.data["kvoffload_load_seconds"][""]
    assert sum(counts) == 2 * len(SECONDS)
    assert sum(sums) == pytest.approx(2 * sum(SECONDS))


def test_aggregating_changes_neither_and_shares_nothing_that_changes() -> None:
    one, other = filled(), filled()
    total = one.aggregate(other)
    assert one == other == filled()
    alone = [one.aggregate(ConnectorStats()), ConnectorStats().aggregate(one)]
    as_it_was = copy.deepcopy(total)
    for stats in (one, other):
        stats.observe("kvoffload_load_seconds", 1.0)
        stats.count("kvoffload_misses_total", 1, reason="no_room")
        stats.set("kvoffload_server_up", 5)
    assert total == as_it_was
    assert alone == [filled(), filled()]


def test_vllms_aggregator_adds_the_stats_of_all_ranks() -> None:
    ranks = [filled(), None, filled(), filled()]
    outputs = [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=stats)
        )
        for stats in ranks
    ]
    merged = KVOutputAggregator(len(ranks)).aggregate(outputs, output_rank=0)
    assert merged is not None
    assert merged.kv_connector_output is not None
    assert merged.kv_connector_output.kv_connector_stats == filled().aggregate(filled()).aggregate(filled())


def test_the_log_line_is_plain_numbers() -> None:
    assert filled().reduce() == {
        "kvoffload_queries_total": 100,
        "kvoffload_misses_total{too_short}": 30,
        "kvoffload_misses_total{no_room}": 6,
        "kvoffload_server_up": 1,
        "kvoffload_load_seconds_count": len(SECONDS),
        "kvoffload_load_seconds_mean": 12.16,
    }


def test_everything_in_the_catalogue_can_be_recorded_sent_and_scraped() -> None:
    stats, prom = ConnectorStats(), make_prom()
    acts = {Kind.COUNTER: stats.count, Kind.GAUGE: stats.set, Kind.HISTOGRAM: stats.observe}
    for metric in ENGINE_METRICS:
        assert not set(metric.labels) & set(LABELNAMES)
        acts[metric.kind](metric.name, 2.5, **dict.fromkeys(metric.labels, "x"))
    prom.observe(sent(stats))
    scraped = scrape()
    for metric in ENGINE_METRICS:
        labels = ",".join(['engine="0"', 'model_name="acme"', *(f'{label}="x"' for label in metric.labels)])
        suffix = "_sum" if metric.kind is Kind.HISTOGRAM else ""
        found = [
            value for series, value in scraped.items() if sorted_labels(series) == f"{metric.name}{suffix}{labels}"
        ]
        assert found == [2.5], metric.name


def sorted_labels(series: str) -> str:
    """`name` and `engine`, `model_name` before our own label."""
    name, _, labels = series.rstrip("}").partition("{")
    parts = labels.split(",")
    return name + ",".join(sorted(parts, key=lambda part: (not part.startswith(("engine", "model_name")), part)))


def test_engines_are_told_apart_and_steps_add_up() -> None:
    prom = make_prom(engines=2)
    for engine, steps in ((0, 1), (1, 3)):
        for _ in range(steps):
            prom.observe(sent(filled()), engine)
    scraped = scrape()
    for engine, steps in ((0, 1), (1, 3)):
        who = f'engine="{engine}",model_name="acme"'
        assert scraped[f"kvoffload_queries_total{{{who}}}"] == 100 * steps
        assert scraped[f'kvoffload_misses_total{{{who},reason="no_room"}}'] == 6 * steps
        assert scraped[f"kvoffload_server_up{{{who}}}"] == 1
        assert scraped[f"kvoffload_load_seconds_count{{{who}}}"] == len(SECONDS) * steps


def test_counters_are_there_from_the_start_and_gauges_are_not() -> None:
    make_prom()
    scraped = scrape()
    assert scraped['kvoffload_queries_total{engine="0",model_name="acme"}'] == 0
    assert scraped['kvoffload_load_seconds_count{engine="0",model_name="acme"}'] == 0
    assert not [series for series in scraped if series.startswith("kvoffload_server_up")]


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(1e-7, 100.0) | st.sampled_from(SECONDS), min_size=1, max_size=60))
def test_prometheus_reads_what_it_would_have_read_of_the_raw_observations(observations: list[float]) -> None:
    stats = ConnectorStats()
    raw = Histogram("raw_seconds", "", registry=None, buckets=BOUNDS)
    for seconds in observations:
        stats.observe("kvoffload_load_seconds", seconds)
        raw.observe(seconds)
    make_prom().observe(sent(stats))
    (fed,) = (family for family in REGISTRY.collect() if family.name == "kvoffload_load_seconds")
    registry = CollectorRegistry()
    registry.register(raw)
    for ours, theirs in zip(samples(fed), samples(*registry.collect()), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def samples(family: Family) -> list[float]:
    """Every bucket's count, then count and sum."""
    return [sample.value for sample in family.samples if not sample.name.endswith("_created")]


def test_a_second_engine_in_a_process_takes_the_names_over() -> None:
    """vLLM's own clean-up knows its own names only; without ours the second engine would not start."""
    first = make_prom()
    first.observe(sent(filled()))
    unregister_vllm_metrics()
    second = make_prom()
    second.observe(sent(filled()))
    assert scrape()['kvoffload_queries_total{engine="0",model_name="acme"}'] == 100


def test_metric_types_of_another_kind_will_do() -> None:
    """Ray's wrappers are in no registry, and can do no more than count, set and observe."""
    calls: list[tuple[str, str, float]] = []

    class Wrapper:
        def __init__(self, name: str, documentation: str, labelnames: list[str], **_more: object) -> None:
            self.name = name

        def labels(self, *values: object) -> Wrapper:
            return self

        def inc(self, value: float) -> None:
            calls.append(("inc", self.name, value))

        def set(self, value: float) -> None:
            calls.append(("set", self.name, value))

        def observe(self, value: float) -> None:
            calls.append(("observe", self.name, value))

    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: dict[Any, Any] = dict.fromkeys(TYPES, Wrapper)
    for _ in range(2):
        ConnectorProm(config, types, LABELNAMES, {0: ["acme", "0"]}).observe(sent(filled()))
    assert calls.count(("inc", "kvoffload_queries_total", 100)) == 2
    assert calls.count(("set", "kvoffload_server_up", 1)) == 2
    assert sum(call[0] == "observe" for call in calls) == 2 * len(SECONDS)
