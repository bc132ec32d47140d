"""How long to wait before the next attempt. Pure."""

from __future__ import annotations

from random import Random

_SPREAD = 0.25


class Backoff:
    """Doubles from `first_ns` to `last_ns`, spread by a quarter so that many do not come at once."""

    def __init__(self, first_ns: int, last_ns: int, random: Random) -> None:
        self._first_ns = first_ns
        self._last_ns = last_ns
        self._random = random
        self._wait_ns = first_ns

    def next_ns(self) -> int:
        """The wait before the next attempt."""
        wait_ns = self._wait_ns
        self._wait_ns = min(2 * wait_ns, self._last_ns)
        return int(wait_ns * self._random.uniform(1 - _SPREAD, 1 + _SPREAD))

    def reset(self) -> None:
        """An attempt went well."""
        self._wait_ns = self._first_ns
