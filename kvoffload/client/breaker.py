"""Whether a server that is there also answers. Pure.

closed ──an answer is late──► open ──any answer──► closed
                               │ ▲
                               └─┘ a probe now and then
"""

from __future__ import annotations

from kvoffload.client.backoff import Backoff


class Breaker:
    """While it is open nothing is asked on anybody's behalf, so that no request waits twice for a server that hangs."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._probe_ns = 0
        self.is_open = False
        self.opened_ns = 0

    def on_answer(self) -> None:
        if self.is_open:
            self.is_open = False
            self._backoff.reset()

    def on_late(self, now_ns: int) -> None:
        """An answer did not come in time."""
        if not self.is_open:
            self.is_open = True
            self.opened_ns = now_ns
            self._probe_ns = now_ns + self._backoff.next_ns()

    def take_probe(self, now_ns: int) -> bool:
        """Whether the server is to be asked now whether it answers again."""
        if not self.is_open or now_ns < self._probe_ns:
            return False
        self._probe_ns = now_ns + self._backoff.next_ns()
        return True
