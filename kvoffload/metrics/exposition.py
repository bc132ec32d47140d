"""A server's counts as the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
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


@dataclass(frozen=True, kw_only=True)
class Distribution(Reading):
    """A histogram: `value` is the sum, `counts` are by bucket, the last beyond all bounds of the catalogue."""

    counts: Sequence[int]


def reading(name: str, value: float, **labels: str) -> Reading:
    return Reading(name=name, value=value, labels=labels)


def distribution(name: str, counts: Sequence[int], total: float, **labels: str) -> Distribution:
    return Distribution(name=name, value=total, labels=labels, counts=counts)


def expose(readings: Iterable[Reading], *, is_open: bool) -> bytes:
    """Writes readings as Prometheus reads them; `is_open`: as OpenMetrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(readings)))
    write: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest if is_open else generate_latest
    return write(registry)


_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Mapping[Kind, Callable[..., _Family]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _accumulate(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Adds counts up as Prometheus has them: each bucket counts those of the buckets before it, too."""
    assert len(counts) == len(bounds) + 1, f"{len(counts)} buckets for {len(bounds)} bounds"
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(map(float, counts)), strict=True))


class _Collector(Collector):
    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[_Family]:
        families: dict[str, _Family] = {}
        for one in self._readings:
            metric = find_metric(one.name)
            if one.name not in families:
                families[one.name] = _FAMILIES[metric.kind](metric.name, metric.help, labels=list(metric.labels))
            if one.labels.keys() != metric.labels.keys():
                raise KeyError(f"{one.name} with labels {sorted(one.labels)}")
            family, labels = families[one.name], [one.labels[label] for label in metric.labels]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(one, Distribution), f"{one.name} is a histogram"
                family.add_metric(labels, _accumulate(metric.buckets, one.counts), one.value)
            else:
                family.add_metric(labels, one.value)
        yield from families.values()
