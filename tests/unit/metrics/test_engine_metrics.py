"""The part of the catalogue that an engine fills."""

from __future__ import annotations

from kvoffload.metrics.engine_metrics import ENGINE_METRICS
from kvoffload.metrics.metric import Source


def test_it_is_in_the_order_of_names_and_says_whose_it_is() -> None:
    names = [metric.name for metric in ENGINE_METRICS]
    assert names == sorted(set(names))
    assert {metric.source for metric in ENGINE_METRICS} <= {Source.ENGINE, Source.BOTH}
