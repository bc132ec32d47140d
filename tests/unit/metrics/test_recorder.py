"""What is recorded is what Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvoffload.metrics.catalog import CATALOG, Kind
from kvoffload.metrics.recorder import Recorder


def test_every_metric_of_the_catalogue_can_be_recorded_and_scraped() -> None:
    registry = CollectorRegistry()
    recorder = Recorder(registry)
    acts = {Kind.COUNTER: recorder.count, Kind.GAUGE: recorder.set, Kind.HISTOGRAM: recorder.observe}
    for metric in CATALOG:
        act = acts[metric.kind]
        act(metric.name, 2.5, **dict.fromkeys(metric.labels, "x"))
    scraped = generate_latest(registry).decode()
    for metric in CATALOG:
        labels = "{" + ",".join(f'{label}="x"' for label in metric.labels) + "}" if metric.labels else ""
        suffix = "_sum" if metric.kind is Kind.HISTOGRAM else ""
        assert f"{metric.name}{suffix}{labels} 2.5" in scraped
        assert f"# HELP {metric.name} {metric.help}" in scraped


def test_a_name_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(KeyError):
        Recorder(CollectorRegistry()).count("kvoffload_surprises_total")
