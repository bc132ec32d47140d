"""Work that is done in parts, each of which takes a millisecond or so."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from typing import TypeAlias, TypeVar

from kvoffload.protocol import ServerMessage

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""Some work that yields after each part, and returns its result."""


class Unfinished(Enum):
    """The result of a call that has done a part of its work, and has to be called again for the next part."""

    MORE = 0


MORE = Unfinished.MORE

FoundLater: TypeAlias = ServerMessage | Callable[[], ServerMessage | None]
"""An answer, or a callable that returns it on the core's thread. None: the answer comes another way."""
Find: TypeAlias = Callable[[], FoundLater | Unfinished]
"""Finds an answer on any thread, one part of the work with each call, until it returns something else than MORE."""


def run_steps(steps: Steps[T]) -> T:
    """Does all parts of some work, and returns its result."""
    part = take_parts(steps)
    while isinstance(found := part(), Unfinished):
        pass
    return found


def take_parts(steps: Steps[T]) -> Callable[[], T | Unfinished]:
    """Returns a callable that does one part of the work with each call. It returns MORE until the work is done, and
    then the result."""

    def take() -> T | Unfinished:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        return MORE

    return take
