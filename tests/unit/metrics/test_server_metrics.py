"""The part of the catalogue that a cache server fills."""

from __future__ import annotations

from kvoffload.metrics.metric import Source
from kvoffload.metrics.server_metrics import SERVER_METRICS


def test_it_is_in_the_order_of_names_and_says_whose_it_is() -> None:
    names = [metric.name for metric in SERVER_METRICS]
    assert names == sorted(set(names))
    assert {metric.source for metric in SERVER_METRICS} <= {Source.SERVER, Source.BOTH}
