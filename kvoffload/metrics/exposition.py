"""A server's counts as the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.metric import Kind

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One number of one metric. Names and labels are those of the catalogue, or KeyErrors."""

    name: str
    value: float
    labels: Mapping[str, str]


def reading(name: str, value: float, **labels: str) -> Reading:
    return Reading(name=name, value=value, labels=labels)


def expose(readings: Iterable[Reading], *, is_open: bool) -> bytes:
    """`is_open`: as OpenMetrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(readings)))
    write: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest if is_open else generate_latest
    return write(registry)


class _Collector(Collector):
    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for one in self._readings:
            metric = find_metric(one.name)
            if one.name not in families:
                make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                families[one.name] = make(metric.name, metric.help, labels=list(metric.labels))
            if one.labels.keys() != metric.labels.keys():
                raise KeyError(f"{one.name} with labels {sorted(one.labels)}")
            families[one.name].add_metric([one.labels[label] for label in metric.labels], one.value)
        yield from families.values()
