"""Goals, ratios and the one JSON line."""

from __future__ import annotations

import json

import pytest

from kvoffload.bench.base import Bound, Goal, Measure, Result


def make_result(goal: Goal | None = None) -> Result:
    return Result(name="x", value=9.0, unit="B/s", limit=10.0, spread=0.01, goal=goal, params={"block_size": 16})


@pytest.mark.parametrize(
    ("goal", "is_met"),
    [
        (Goal(Measure.RATIO, Bound.AT_LEAST, 0.9), True),
        (Goal(Measure.RATIO, Bound.AT_LEAST, 0.91), False),
        (Goal(Measure.RATIO, Bound.AT_MOST, 0.9), True),
        (Goal(Measure.VALUE, Bound.AT_LEAST, 9.0), True),
        (Goal(Measure.VALUE, Bound.AT_MOST, 8.9), False),
        (None, None),
    ],
)
def test_a_goal_is_met_on_its_side(goal: Goal | None, is_met: bool | None) -> None:
    assert make_result(goal).is_met is is_met


def test_the_json_line_has_the_agreed_fields() -> None:
    line = json.loads(json.dumps(make_result(Goal(Measure.RATIO, Bound.AT_LEAST, 0.85)).as_json()))
    assert line == {
        "name": "x",
        "value": 9.0,
        "unit": "B/s",
        "limit": 10.0,
        "ratio": 0.9,
        "spread": 0.01,
        "goal": "ratio at least 0.85",
        "met": True,
        "block_size": 16,
    }
