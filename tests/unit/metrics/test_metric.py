"""A metric's own rules."""

from __future__ import annotations

import pytest

from kvoffload.metrics.metric import Kind, Metric, Unit


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "kvoffload_hits"},
        {"name": "hits_total"},
        {"unit": Unit.BYTES},
        {"kind": Kind.HISTOGRAM},
        {"buckets": (1.0,)},
    ],
)
def test_a_name_carries_its_kind_and_unit(wrong: dict[str, object]) -> None:
    right = {"name": "kvoffload_hits_total", "kind": Kind.COUNTER, "unit": Unit.NONE, "help": "Hits.", "labels": {}}
    Metric(**right)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        Metric(**(right | wrong))  # type: ignore[arg-type]
