"""What a clone's benchmark prints."""

from __future__ import annotations

from kvoffload.bench.base import Bound, Goal, Measure, Result

RESULT = Result(
    name="ttft",
    value=3.0,
    unit="ms",
    limit=4.0,
    spread=0.5,
    goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.05),
    params={"connector": "kvoffload", "prompt": 4096},
)
