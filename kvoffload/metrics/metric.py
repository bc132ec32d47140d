"""The description of a metric: its name, kind, unit, labels and help text. Names carry base units."""

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


class Source(Enum):
    """The process that counts a metric, and the place where it is read."""

    ENGINE = "engine"
    """The connector, in the engine's own metrics."""
    SERVER = "server"
    """The cache server, from /metrics of `kvoffload web`."""
    BOTH = "engine, server"


class Unit(Enum):
    """Base units, and the suffix that a name of this unit carries."""

    NONE = ""
    BYTES = "bytes"
    SECONDS = "seconds"
    RATIO = "ratio"
    BYTES_PER_SECOND = "bytes_per_second"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. `labels` maps each label to what its values are; the number of values is bounded by that text."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: dict[str, str]
    buckets: tuple[float, ...] = ()
    source: Source = Source.ENGINE

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        stem = self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name
        assert self.kind is not Kind.COUNTER or self.name.endswith("_total"), f"{self.name}: a counter ends in _total"
        assert not self.unit.value or stem.endswith("_" + self.unit.value), f"{self.name}: the unit is missing"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), f"{self.name}: buckets belong to histograms"
