"""Fills the catalogue: the only place that makes Prometheus objects."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvoffload.metrics.catalog import CATALOG, Kind, Metric


class Recorder:
    """One process's metrics in one registry. Any thread may record; unknown names and labels are KeyErrors."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._instruments = {metric.name: _make_instrument(metric, registry) for metric in CATALOG}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        instrument = self._instruments[name]
        assert isinstance(instrument, Counter), name
        (instrument.labels(**labels) if labels else instrument).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        instrument = self._instruments[name]
        assert isinstance(instrument, Gauge), name
        (instrument.labels(**labels) if labels else instrument).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one observation into a histogram."""
        instrument = self._instruments[name]
        assert isinstance(instrument, Histogram), name
        (instrument.labels(**labels) if labels else instrument).observe(value)


def _make_instrument(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = tuple(metric.labels)
    if metric.kind is Kind.COUNTER:
        return Counter(metric.name, metric.help, labels, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(metric.name, metric.help, labels, registry=registry)
    return Histogram(metric.name, metric.help, labels, registry=registry, buckets=metric.buckets)
