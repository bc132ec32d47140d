"""A fault of a hook is noted and answered, and what is not a fault goes through."""

from __future__ import annotations

import pytest

from kvoffload.engines.degrade import degrade


class Side:
    """A side with one hook, which fails or not."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, str]] = []

    def note_fault(self, hook: str, fault: Exception) -> None:
        self.noted.append((hook, str(fault)))

    @degrade(lambda: -1)
    def count(self, number: int, *, fault: BaseException | None = None) -> int:
        """Counts a thing."""
        if fault is not None:
            raise fault
        return number


def test_an_answer_is_handed_on() -> None:
    side = Side()
    assert (side.count(3), side.noted) == (3, [])
    assert (Side.count.__name__, Side.count.__doc__) == ("count", "Counts a thing.")


def test_a_fault_is_noted_and_answered() -> None:
    side = Side()
    assert side.count(3, fault=ValueError("wrong")) == -1
    assert side.noted == [("count", "wrong")]


def test_an_interrupt_is_no_fault() -> None:
    side = Side()
    with pytest.raises(KeyboardInterrupt):
        side.count(3, fault=KeyboardInterrupt())
    assert side.noted == []
