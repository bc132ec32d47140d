"""Whether numbered messages arrive in order. One that does not ends the sequence: no lost message is guessed."""

from __future__ import annotations

from enum import Enum

from kvoffload.protocol.fields import U64_MAX


class Arrival(Enum):
    """How a numbered message arrived. After everything but IN_ORDER the session is reset."""

    IN_ORDER = "in order"
    DUPLICATE = "duplicate"
    GAP = "gap"
    OVERFLOW = "overflow"


class InboundSequence:
    """The receiving side of one-way messages, or of events. Belongs to the thread that receives."""

    def __init__(self, *, first: int = 1, last: int = U64_MAX) -> None:
        self._next = first
        self._last = last
        self._broken: Arrival | None = None

    @property
    def received(self) -> int:
        """Returns the last number that arrived in order; 0: none did."""
        return self._next - 1

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def accept(self, number: int) -> Arrival:
        """Judges a number. IN_ORDER: serve it. Else, and for all that come afterwards: what broke the sequence."""
        if self._broken is None:
            self._broken = self._find_break(number)
        if self._broken is not None:
            return self._broken
        self._next += 1
        return Arrival.IN_ORDER

    def overflow(self) -> Arrival:
        """Ends the sequence: the receiver had no room for a message, whatever its number."""
        self._broken = self._broken or Arrival.OVERFLOW
        return self._broken

    def _find_break(self, number: int) -> Arrival | None:
        if number > self._last:
            return Arrival.OVERFLOW
        if number == self._next:
            return None
        return Arrival.DUPLICATE if number < self._next else Arrival.GAP
