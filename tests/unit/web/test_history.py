"""The last hour in columns: bounded, with holes where the server was away."""

from __future__ import annotations

from typing import Any

from kvoffload.top.samples import Sample, as_row, compare
from kvoffload.web.history import MAX_SERIES, POINTS, History
from tests.kit.top.made_up import DISK, INSIGHT, stats


def row(**changes: Any) -> dict[str, Any]:
    sample = Sample(time_s=0.0, stats=stats(**changes), insight=INSIGHT)
    return as_row(sample, compare(None, sample))


def test_each_series_is_as_long_as_the_times() -> None:
    history = History()
    history.add(1.0, row())
    history.add(2.0, {"up": False, "fault": "gone"})
    history.add(3.0, row(places=(DISK,), traffic={"disk": {"written_bytes": 5, "promoted_bytes": 6}}))
    told = history.describe()
    assert told["times"] == [1.0, 2.0, 3.0]
    assert told["series"]["tokens.hit_memory"] == [600, None, 600]
    assert told["series"]["tiers.disk.written_bytes"] == [None, None, 5]
    assert told["series"]["memory.used_bytes"] == [stats().used_bytes, None, stats().used_bytes]


def test_it_keeps_an_hour_and_not_more() -> None:
    history = History()
    for second in range(POINTS + 10):
        history.add(float(second), row())
    told = history.describe()
    assert (len(told["times"]), told["times"][0]) == (POINTS, 10.0)


def test_a_server_that_tells_of_endless_names_is_bounded() -> None:
    told = row()
    told["prompts"]["totals"] = {f"reason_{number}": number for number in range(10 * MAX_SERIES)}
    history = History()
    history.add(1.0, told)
    assert len(history.describe()["series"]) == MAX_SERIES


def test_a_server_without_insight_has_the_rest() -> None:
    sample = Sample(time_s=0.0, stats=stats())
    history = History()
    history.add(1.0, as_row(sample, compare(None, sample)))
    assert "memory.used_bytes" in history.describe()["series"]
