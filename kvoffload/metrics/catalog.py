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


_TRANSFER_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

CATALOG: tuple[Metric, ...] = (
    Metric(
        name="kvoffload_dropped_saves_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Blocks that were to be saved and were not, by what was lacking.",
        labels={
            "reason": "no_slot (room in the cache), no_pin (leave to hold more of the engine's blocks), no_server "
            "(it ended while they were copied to its memory)"
        },
    ),
    Metric(
        name="kvoffload_errors_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Faults that were turned into a miss or a refusal.",
        labels={"code": "an error code of docs/errors.md"},
    ),
    Metric(
        name="kvoffload_failed_loads_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Loads that failed after they were promised; the engine computes or ends those requests, as it is set.",
        labels={},
    ),
    Metric(
        name="kvoffload_failed_saves_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Saves that failed; their blocks are misses later.",
        labels={},
    ),
    Metric(
        name="kvoffload_faults_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Faults in hooks of the connector, each answered as if nothing had been cached.",
        labels={"hook": "a method that the engine calls"},
    ),
    Metric(
        name="kvoffload_hits_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that were promised to the engine, by the tier that held them.",
        labels={"tier": "memory or lower"},
    ),
    Metric(
        name="kvoffload_leased_blocks",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="Cached blocks that are kept from eviction until they are loaded.",
        labels={},
    ),
    Metric(
        name="kvoffload_load_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time of a load, until every byte is in the engine's KV cache.",
        labels={},
        buckets=_TRANSFER_BUCKETS,
    ),
    Metric(
        name="kvoffload_loaded_bytes_total",
        kind=Kind.COUNTER,
        unit=Unit.BYTES,
        help="Bytes that were copied into the engine's KV cache.",
        labels={},
    ),
    Metric(
        name="kvoffload_misses_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that were asked about and not promised, by why; with the hits they add up to the queries.",
        labels={
            "reason": "never_seen, too_short, not_served, refused, slow_to_answer, no_room, slower_than_computing, "
            "tier_too_slow or skipped"
        },
    ),
    Metric(
        name="kvoffload_pinned_blocks",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="Blocks of the engine that are held until they are saved.",
        labels={},
    ),
    Metric(
        name="kvoffload_queries_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that the engine did not have itself and asked about.",
        labels={},
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
        help="Time to check, prove and self-test a registration, and to join the cache server.",
        labels={},
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    Metric(
        name="kvoffload_save_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time of a save, until the engine's blocks may be used again.",
        labels={},
        buckets=_TRANSFER_BUCKETS,
    ),
    Metric(
        name="kvoffload_saved_bytes_total",
        kind=Kind.COUNTER,
        unit=Unit.BYTES,
        help="Bytes that were copied out of the engine's KV cache.",
        labels={},
    ),
    Metric(
        name="kvoffload_server_up",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="1 while the cache server answers, else 0.",
        labels={},
    ),
)


def find_metric(name: str) -> Metric:
    """The catalogue's row of this name; KeyError for any other name."""
    return _BY_NAME[name]


_BY_NAME = {metric.name: metric for metric in CATALOG}
assert len(_BY_NAME) == len(CATALOG), "a metric is listed twice"
