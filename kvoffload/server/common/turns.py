"""Lines of users who take turns, so that no user waits for all that another one wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Things that users want, each user's in the order in which they came. Belongs to one thread."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[T]] = {}
        """Things that are wanted, by user. The first thing of the first user comes next."""

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, owner: Hashable, wanted: T) -> None:
        self._lines.setdefault(owner, deque()).append(wanted)

    def take(self) -> tuple[Hashable, T]:
        """Returns what comes next, and whose it is. That user's next turn comes after those of all others. IndexError:
        there is nothing."""
        owner = next(iter(self._lines), None)
        line = self._lines.pop(owner, deque())
        wanted = line.popleft()
        if line:
            self._lines[owner] = line
        return owner, wanted
