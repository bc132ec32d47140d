"""The catalogue of metrics: every name, unit, label and help text, once.

Prometheus, the dashboard, the terminal, Grafana and docs/reference.md are made from it.
"""

from __future__ import annotations

from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.metric import Metric
from kvoffload.metrics.server_metrics import SERVER_METRICS

CATALOG: tuple[Metric, ...] = (*ENGINE_METRICS, *SERVER_METRICS)


def find_metric(name: str) -> Metric:
    """The catalogue's row of this name; KeyError for any other name."""
    return _BY_NAME[name]


_BY_NAME = {metric.name: metric for metric in CATALOG}
assert len(_BY_NAME) == len(CATALOG), "a metric is listed twice"
