"""Estimates how fast a tier is, and how long what it has been given will take. No clock: the caller measures."""

from __future__ import annotations

from math import isfinite

SAMPLE_WEIGHT = 1 / 8
FIRST_GUESS = 500e6
"""Bytes a second that are assumed until something was measured."""


class TierRate:
    """One direction of one tier: a moving estimate of bytes per second of the time in which it has work."""

    def __init__(self, first_guess: float = FIRST_GUESS) -> None:
        self._rate = first_guess
        self._bytes = 0.0
        self._seconds = 0.0
        self._busy_since_s = 0.0
        self.queued_bytes = 0
        """Bytes that were begun and have not ended."""

    @property
    def bytes_per_s(self) -> float:
        return self._rate

    @property
    def is_measured(self) -> bool:
        return self._seconds > 0

    def measure_anew(self) -> None:
        """Discards what was measured, as it is old: the next transfer that ends decides the estimate alone."""
        self._bytes = self._seconds = 0.0

    def begin(self, size_bytes: int, now_s: float) -> None:
        """Notes that the tier was given so much."""
        if not self.queued_bytes:
            self._busy_since_s = now_s
        self.queued_bytes += size_bytes

    def end(self, size_bytes: int, now_s: float, *, moved_bytes: int | None = None) -> None:
        """Notes that the tier has finished with so much, and how much of it it moved: all, unless `moved_bytes` is
        given."""
        self.queued_bytes -= size_bytes
        seconds = now_s - self._busy_since_s
        self._busy_since_s = now_s
        moved = size_bytes if moved_bytes is None else moved_bytes
        if not (seconds > 0 and isfinite(seconds)):
            # Two that ended at once: the next one has the time of both.
            self._bytes += moved * SAMPLE_WEIGHT
            return
        self._bytes += (moved - self._bytes) * SAMPLE_WEIGHT if self._seconds else moved
        self._seconds += (seconds - self._seconds) * SAMPLE_WEIGHT if self._seconds else seconds
        self._rate = max(self._bytes / self._seconds, 1.0)

    def estimate_s(self, size_bytes: int) -> float:
        """Returns the seconds until so many more bytes have been moved, after all that is under way."""
        return (self.queued_bytes + size_bytes) / self._rate
