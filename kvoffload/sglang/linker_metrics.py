"""The counts of one rank as metrics of SGLang's own `/metrics`, for engines that run with `--enable-metrics`.

SGLang gathers the metrics of its processes through files in a folder, which `prometheus_client` looks for when it is
imported. SGLang has named the folder before it starts its schedulers; here the package is imported only if metrics are
wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.metric import Kind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvoffload.client import PromptNote

RECORDED = (
    "kvoffload_dropped_saves_total",
    "kvoffload_failed_loads_total",
    "kvoffload_failed_saves_total",
    "kvoffload_faults_total",
    "kvoffload_hits_total",
    "kvoffload_load_bytes_per_second",
    "kvoffload_load_seconds",
    "kvoffload_loaded_bytes_total",
    "kvoffload_misses_total",
    "kvoffload_queries_total",
    "kvoffload_save_seconds",
    "kvoffload_saved_bytes_total",
    "kvoffload_server_up",
)
"""The metrics of an engine that a rank of SGLang records, by their names in the catalogue."""


class LinkerMetrics:
    """Records into the registry of this process. Any thread may call it. Names and labels are those of the catalogue,
    after the labels of the engine."""

    def __init__(self, labels: Mapping[str, str], *, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None is the one of the process."""
        self._instruments = _make_instruments(tuple(labels), registry)
        self._values = tuple(labels.values())
        self._gauges: dict[str, float] = {}
        for name, instrument in self._instruments.items():
            metric = find_metric(name)
            if metric.kind is not Kind.GAUGE and not metric.labels:
                # Made at the start, so that a rate sees the first event.
                instrument.labels(*self._values)

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """Adds to a counter. An amount of 0 records nothing."""
        if amount:
            self._instruments[name].labels(*self._values, *labels).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """Puts one observation into a histogram."""
        self._instruments[name].labels(*self._values).observe(value)

    def set(self, name: str, value: float) -> None:
        """Sets a gauge, if it is not what it was."""
        if self._gauges.get(name) != value:
            self._gauges[name] = value
            self._instruments[name].labels(*self._values).set(value)

    def count_prompt(self, note: PromptNote) -> None:
        """Counts what became of a prompt's tokens."""
        self.count("kvoffload_queries_total", note.tokens)
        self.count("kvoffload_hits_total", note.boundary, "memory")
        self.count("kvoffload_misses_total", note.tokens - note.boundary, note.miss.label)

    def count_load(self, size_bytes: int, seconds: float) -> None:
        """Counts a load whose bytes are all there."""
        self.count("kvoffload_loaded_bytes_total", size_bytes)
        self.observe("kvoffload_load_seconds", seconds)
        if seconds > 0:
            self.observe("kvoffload_load_bytes_per_second", size_bytes / seconds)

    def count_save(self, size_bytes: int, seconds: float) -> None:
        """Counts a save whose copy has ended well."""
        self.count("kvoffload_saved_bytes_total", size_bytes)
        self.observe("kvoffload_save_seconds", seconds)


def open_metrics(arguments: Any, *, rank: int) -> LinkerMetrics | None:
    """Returns the metrics of a rank of the engine with these resolved arguments. None: the engine has no metrics, and
    nothing is registered."""
    if not getattr(arguments, "enable_metrics", False):
        return None
    labels = {
        "model_name": str(getattr(arguments, "served_model_name", None) or arguments.model_path),
        "tp_rank": str(rank),
        "pp_rank": "0",
        **(getattr(arguments, "extra_metric_labels", None) or {}),
    }
    return LinkerMetrics(labels)


@functools.cache
def _make_instruments(labels: tuple[str, ...], registry: CollectorRegistry | None) -> dict[str, Any]:
    """Registers the metrics, once in a registry."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    kinds: Mapping[Kind, Any] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
    instruments: dict[str, Any] = {}
    for metric in map(find_metric, RECORDED):
        more: dict[str, Any] = {}
        if metric.kind is Kind.GAUGE:
            more["multiprocess_mode"] = "mostrecent"
        elif metric.kind is Kind.HISTOGRAM:
            more["buckets"] = metric.buckets
        names = [*labels, *metric.labels]
        instruments[metric.name] = kinds[metric.kind](
            metric.name, metric.help, names, registry=registry or REGISTRY, **more
        )
    return instruments
