"""Sends warnings of the server's log to its engines' logs, as operators of an engine seldom read the server's log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta

from kvoffload.protocol import Warned
from kvoffload.protocol.limits import LINE_BYTES
from kvoffload.server.sessions.outbox import ToLifeline
from kvoffload.server.sessions.session import EngineSession
from kvoffload.server.tiering.counts import cut_text

KEPT = 32
"""Number of the latest warnings that are kept, for engines that come after them. When one tick has more, the others are
in the server's log alone."""
OLD_S = 10.0
"""Seconds after which a warning is sent with its age, as its cause may be over."""
WHAT_SERVES = ("kvoffload.server", "kvoffload.peers", "kvoffload.cache", "kvoffload.tiers")
"""Loggers of the packages that a server consists of."""


class WarningFeed(logging.Handler):
    """Collects warnings of the log. Any thread logs; `tell` belongs to the thread of the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT)
        """Pairs of the time at which a warning was logged and its text."""
        self._count = 0

    def start(self) -> None:
        """Begins to collect warnings."""
        for name in WHAT_SERVES:
            logging.getLogger(name).addHandler(self)

    def stop(self) -> None:
        for name in WHAT_SERVES:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a warning as one line. `handle` holds the handler's lock."""
        line = record.getMessage()
        fault = record.exc_info[1] if record.exc_info else None
        if fault is not None:
            line += f": {type(fault).__name__}: {fault}"
        shown = "".join(sign if sign.isprintable() else " " for sign in line)
        self._lines.append((self._clock(), cut_text(" ".join(shown.split()), LINE_BYTES)))
        self._count += 1

    def tell(self, sessions: Iterable[EngineSession], *, only_users: frozenset[int] | None) -> list[ToLifeline]:
        """Returns the warnings to send to each process that wants them and has not been told them yet. `only_users`:
        only processes of these users are told; None: those of all users."""
        with self.lock:  # type: ignore[union-attr]
            lines, count = list(self._lines), self._count
        sent: list[ToLifeline] = []
        for session in sessions:
            if only_users is not None and session.uid not in only_users:
                continue
            for process in session.processes.values():
                if process.wants_warnings and process.warned < count:
                    first = max(process.warned, count - len(lines))
                    for number in range(first, count):
                        logged_s, line = lines[number - count]
                        message = _describe(line, self._clock() - logged_s)
                        sent.append(ToLifeline(process.lifeline, Warned(number=number + 1, message=message)))
                    process.warned = count
        return sent


def _describe(line: str, age_s: float) -> str:
    return line if age_s < OLD_S else cut_text(f"{timedelta(seconds=int(age_s))} ago: {line}", LINE_BYTES)
