"""The catalogue of metrics: every name, unit, label and help text, once.

Prometheus, the dashboard, the terminal, Grafana and docs/metrics.md are made from it. Names carry base units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_NAME = re.compile(r"kvoffload_[a-z][a-z0-9_]*")


class Kind(Enum):
    """Prometheus's kinds that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(Enum):
    """Base units, and the suffix that a name of this unit carries."""

    NONE = ""
    BYTES = "bytes"
    SECONDS = "seconds"
    RATIO = "ratio"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. `labels` maps each label to what its values are; the number of values is bounded by that text."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: dict[str, str]
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        stem = self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name
        assert self.kind is not Kind.COUNTER or self.name.endswith("_total"), f"{self.name}: a counter ends in _total"
        assert not self.unit.value or stem.endswith("_" + self.unit.value), f"{self.name}: the unit is missing"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), f"{self.name}: buckets belong to histograms"


CATALOG: tuple[Metric, ...] = (
    Metric(
        name="kvoffload_errors_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Faults that were turned into a miss or a refusal.",
        labels={"code": "an error code of docs/errors.md"},
    ),
    Metric(
        name="kvoffload_registered_bytes",
        kind=Kind.GAUGE,
        unit=Unit.BYTES,
        help="Bytes of the engine's KV allocations, by what the completeness proof found them to be.",
        labels={"claim": "page, padding or exclusion"},
    ),
    Metric(
        name="kvoffload_registration_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time to check, prove and self-test a registration.",
        labels={},
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
)


def find_metric(name: str) -> Metric:
    """The catalogue's row of this name; KeyError for any other name."""
    return _BY_NAME[name]


_BY_NAME = {metric.name: metric for metric in CATALOG}
assert len(_BY_NAME) == len(CATALOG), "a metric is listed twice"
