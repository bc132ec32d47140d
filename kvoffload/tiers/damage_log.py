"""Log lines about records of a place that are not the ones that were put there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 600.0
"""Shortest time between two lines about one place, in seconds."""

logger = logging.getLogger(__name__)


class DamageLog:
    """Counts the records, and logs them now and then. Belongs to one tier, which calls it under its lock."""

    def __init__(self, place: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._clock = clock
        self._count = 0
        self._quiet_until_s = 0.0

    def note(self, count: int) -> None:
        """Notes records that were found damaged, or did not open with the keys of this server."""
        self._count += count
        now_s = self._clock()
        if self._count and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + EVERY_S
            logger.warning(
                "%s: %d records are misses: damaged, not sealed, or sealed with a key that this server does not have",
                self._place,
                self._count,
            )
            self._count = 0
