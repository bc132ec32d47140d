"""Our metrics on their way through the engine: from workers and scheduler to vLLM's log line and its /metrics.

vLLM carries one stats object a step from its core process to a front end, where Prometheus lives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.metric import Kind, Metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEPARATOR = ","
"""The separator of label values in a key: keys are text, because stats are sent as msgpack."""

# This process's instruments, so that a new engine can take their names over from a former one.
_registered: list[Any] = []


class ConnectorStats(KVConnectorStats):
    """The measurements of one process since the last hand-over. Owned by the thread that records them.

    `data` is name -> label values -> value: a number, or for a histogram `[counts, sums]` with a place for each bucket.
    So its size depends on the catalogue and not on the load. Names and labels that are not in the catalogue raise
    KeyError here and not in the front end.

    After handing one over, the process must record into another: vLLM keeps the object.
    """

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter. An amount of 0 records nothing."""
        series, key = self._find(name, Kind.COUNTER, labels)
        assert amount >= 0, f"{name}: a counter never falls"
        if amount:
            self.data.setdefault(name, series)[key] = series.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. For the scheduler's process only: ranks would overwrite each other's."""
        series, key = self._find(name, Kind.GAUGE, labels)
        self.data.setdefault(name, series)[key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one observation into a histogram."""
        series, key = self._find(name, Kind.HISTOGRAM, labels)
        bounds = find_metric(name).buckets
        counts, sums = series.get(key) or ([0] * (len(bounds) + 1), [0.0] * (len(bounds) + 1))
        bucket = bisect_left(bounds, value)
        # The lists are replaced and not changed, because aggregated stats share them.
        counts, sums = list(counts), list(sums)
        counts[bucket] += 1
        sums[bucket] += value
        self.data.setdefault(name, series)[key] = [counts, sums]

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Returns both as one. For a gauge the other's value counts, which is later, or the scheduler's.

        Neither is changed: vLLM may hold them, and its log accumulates into the very payload that Prometheus reads.
        """
        assert isinstance(other, ConnectorStats)
        merged = {name: dict(series) for name, series in self.data.items()}
        for name, series in other.data.items():
            kind, mine = find_metric(name).kind, merged.setdefault(name, {})
            for key, value in series.items():
                mine[key] = _join(kind, mine[key], value) if key in mine else value
        return ConnectorStats(merged)

    def reset(self) -> None:
        """Forgets all measurements."""
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's log line: for a histogram the number of observations and their mean."""
        line: dict[str, int | float] = {}
        for name, series in self.data.items():
            for key, value in series.items():
                shown = f"{name}{{{key}}}" if key else name
                if find_metric(name).kind is Kind.HISTOGRAM:
                    counts, sums = value
                    line[f"{shown}_count"] = sum(counts)
                    line[f"{shown}_mean"] = float(f"{sum(sums) / sum(counts):.4g}")
                else:
                    line[shown] = value
        return line

    def is_empty(self) -> bool:
        """Returns whether nothing was recorded."""
        return not self.data

    def _find(self, name: str, kind: Kind, labels: Mapping[str, str]) -> tuple[dict[str, Any], str]:
        metric = find_metric(name)
        assert metric.kind is kind, f"{name} is a {metric.kind.value}"
        if labels.keys() != metric.labels.keys():
            raise KeyError(f"{name} has the labels {tuple(metric.labels)}, not {tuple(labels)}")
        values = [labels[label] for label in metric.labels]
        assert not any(SEPARATOR in value for value in values), f"{name}: {values}"
        return self.data.get(name, {}), SEPARATOR.join(values)


class ConnectorProm(KVConnectorPromMetrics):
    """The catalogue as metrics of vLLM's types, with its labels before ours. Owned by the front end's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        forget_registered()
        self._instruments = {metric.name: self._make_instrument(metric) for metric in ENGINE_METRICS}
        for metric in ENGINE_METRICS:
            if metric.kind is not Kind.GAUGE and not metric.labels:
                # Made at the start, so that a rate sees the first event. A gauge that was never set would show a lie.
                for values in per_engine_labelvalues.values():
                    self._instruments[metric.name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes one step's `ConnectorStats.data`."""
        for name, series in transfer_stats_data.items():
            metric = find_metric(name)
            for key, value in series.items():
                ours = key.split(SEPARATOR) if metric.labels else []
                instrument = self._instruments[name].labels(*self.per_engine_labelvalues[engine_idx], *ours)
                if metric.kind is Kind.COUNTER:
                    instrument.inc(value)
                elif metric.kind is Kind.GAUGE:
                    instrument.set(value)
                else:
                    _feed(instrument, metric.buckets, value)

    def _make_instrument(self, metric: Metric) -> Any:
        make: dict[Kind, Any] = {
            Kind.COUNTER: self._counter_cls,
            Kind.GAUGE: self._gauge_cls,
            Kind.HISTOGRAM: self._histogram_cls,
        }
        more: dict[Kind, dict[str, Any]] = {
            # vLLM gives each step's stats to one of its front ends, so the latest value of any of them counts.
            Kind.GAUGE: {"multiprocess_mode": "mostrecent"},
            Kind.HISTOGRAM: {"buckets": list(metric.buckets)},
        }
        names = [*self._labelnames, *metric.labels]
        instrument = make[metric.kind](metric.name, metric.help, names, **more.get(metric.kind, {}))
        _registered.append(instrument)
        return instrument


def _feed(histogram: Any, bounds: tuple[float, ...], value: list[list[float]]) -> None:
    """Puts every observation into the histogram, each as the mean of its bucket.

    A histogram accepts only single observations, also with vLLM's other metric types (Ray's). The mean of a bucket lies
    in the bucket, so counts and sum become exactly those of the raw observations, without leaving any out. It takes as
    many calls as the raw observations would.
    """
    for bucket, (count, total) in enumerate(zip(*value, strict=True)):
        if not count:
            continue
        lowest = nextafter(bounds[bucket - 1], inf) if bucket else -inf
        highest = bounds[bucket] if bucket < len(bounds) else inf
        # Rounding may move the mean of equal values slightly, over the bucket's edge.
        mean = min(max(total / count, lowest), highest)
        for _ in range(int(count)):
            histogram.observe(mean)


def _join(kind: Kind, one: Any, other: Any) -> Any:
    if kind is Kind.GAUGE:
        return other
    if kind is Kind.COUNTER:
        return one + other
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(one, other, strict=True)]


def forget_registered() -> None:
    """Unregisters our metrics, so that a second engine in a process can make them again.

    vLLM does this for its own metrics, by their prefix `vllm:`. Ours would stay, and the second engine could not start
    because their names would be taken.
    """
    for instrument in _registered:
        with suppress(KeyError):  # never in this registry (Ray's types), or gone from it
            REGISTRY.unregister(instrument)
    _registered.clear()
