"""The catalogue's own rules."""

from __future__ import annotations

from kvoffload.metrics.catalog import CATALOG, find_metric


def test_every_metric_is_described() -> None:
    for metric in CATALOG:
        assert metric.help.endswith(".")
        assert find_metric(metric.name) is metric
        assert all(metric.labels.values())


def test_buckets_rise() -> None:
    for metric in CATALOG:
        assert list(metric.buckets) == sorted(set(metric.buckets))
