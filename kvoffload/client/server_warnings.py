"""Writes what a cache server warns of into the log of the process that it serves."""

from __future__ import annotations

import logging

from kvoffload.protocol import Warned

logger = logging.getLogger(__name__)

MOST_LINES = 100
"""So many warnings of one server are logged. Those after them are counted, and stand in its own log."""


class ServerWarnings:
    """Belongs to whoever holds the client's lock. A server tells its last ones again to whoever comes back to it."""

    def __init__(self) -> None:
        self.count = 0
        """How many were heard, of all servers."""
        self._boot_id = 0
        self._last = 0

    def hear(self, warned: Warned, boot_id: int) -> None:
        """Logs it, if it is new."""
        if boot_id != self._boot_id:
            self._boot_id, self._last = boot_id, 0
        if warned.number <= self._last:
            return
        self._last = warned.number
        self.count += 1
        if warned.number < MOST_LINES:
            logger.warning("the cache server warns: %s", warned.message)
        elif warned.number == MOST_LINES:
            logger.warning("the cache server warns: %s; what follows is in its own log alone", warned.message)
