"""The one way in which a fault of ours becomes a miss: the engine must live, whatever it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class NotesFaults(Protocol):
    """An object whose methods the engine calls, and that counts their faults."""

    def note_fault(self, hook: str, fault: Exception) -> None:
        """Counts a fault; the first of a hook is logged."""
        ...


S = TypeVar("S", bound=NotesFaults)
P = ParamSpec("P")
R = TypeVar("R")


def degrade(
    otherwise: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """A fault of the decorated hook is noted, and `otherwise` gives the answer."""

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as fault:  # noqa: BLE001  (as above)
                self.note_fault(hook.__name__, fault)
                return otherwise()

        return guarded

    return decorate
