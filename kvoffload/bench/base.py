"""The parts of a benchmark: a question, a limit of this machine that is measured with it, and a goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Measure(Enum):
    """The number that a goal limits."""

    VALUE = "value"
    RATIO = "ratio"


class Bound(Enum):
    """Whether a goal is a floor or a ceiling."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True)
class Goal:
    """A line of an issue's table of numbers."""

    measure: Measure
    bound: Bound
    number: float

    def is_met(self, *, value: float, ratio: float) -> bool:
        """Whether what was measured is on the right side; a tie is."""
        measured = value if self.measure is Measure.VALUE else ratio
        return measured >= self.number if self.bound is Bound.AT_LEAST else measured <= self.number

    def __str__(self) -> str:
        return f"{self.measure.value} {self.bound.value} {self.number:g}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured line. `value` and `limit` are medians in `unit`; `spread`: width of the ratios' middle half."""

    name: str
    value: float
    unit: str
    limit: float
    spread: float
    goal: Goal | None
    params: Mapping[str, int | float | str]

    @property
    def ratio(self) -> float:
        """Returns the value over the limit."""
        return self.value / self.limit

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met, or None if there is no goal."""
        return None if self.goal is None else self.goal.is_met(value=self.value, ratio=self.ratio)

    def as_json(self) -> dict[str, object]:
        """The one line that `--json` prints."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "ratio": self.ratio,
            "spread": self.spread,
            "goal": None if self.goal is None else str(self.goal),
            "met": self.is_met,
            **self.params,
        }


Progress = Callable[[str], None]


class Benchmark(Protocol):
    """One file of this room holds one of these; `run` yields a result per row of its table."""

    name: str
    question: str

    def run(self, progress: Progress) -> Iterator[Result]:
        """Raises BenchmarkError where it cannot run here; never leaves a process or a file behind."""
        ...
