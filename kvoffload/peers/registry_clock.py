"""The clock of a fleet's registry, which somebody may set, beside this machine's own that nobody does."""

from __future__ import annotations

from dataclasses import dataclass

_TOLERANCE_MS = 1000
"""Clocks that are led back to the right time run faster or slower meanwhile; nobody has set them."""
_TOLERANCE_RATE = 1 / 1000


@dataclass(frozen=True)
class _Reading:
    told_ms: int
    asked_s: float
    answered_s: float


class RegistryClock:
    """Of one thread. Pure: whoever asks the registry says when it asked and was answered, by a monotonic clock."""

    def __init__(self) -> None:
        self._last: _Reading | None = None

    def read(self, told_ms: int, *, asked_s: float, answered_s: float) -> int:
        """By how many milliseconds the registry's clock was set since the last reading; 0 if it has just gone on."""
        last, self._last = self._last, _Reading(told_ms, asked_s, answered_s)
        if last is None:
            return 0
        went_ms = told_ms - last.told_ms
        # When within a question the clock was read is not known.
        least_ms = int((asked_s - last.answered_s) * 1000)
        most_ms = int((answered_s - last.asked_s) * 1000)
        slack_ms = _TOLERANCE_MS + int(most_ms * _TOLERANCE_RATE)
        if least_ms - slack_ms <= went_ms <= most_ms + slack_ms:
            return 0
        return went_ms - (most_ms if went_ms > most_ms else least_ms)
