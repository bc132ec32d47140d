"""Log lines about prompts that were computed although their blocks are stored, or may be."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvoffload.protocol import Miss

logger = logging.getLogger(__name__)

LINE_PAUSE_S = 600.0
"""Least number of seconds between two such lines."""

_WHY_COMPUTED = {
    Miss.NOT_SERVED: ("the cache server does not serve this engine at the moment", "server"),
    Miss.SLOW_TO_ANSWER: (
        "the cache server did not answer within acquire_deadline, or the step's calls took longer than step_budget",
        "acquire_deadline, step_budget",
    ),
    Miss.REFUSED: ("the cache server gave no lease, or the load failed", "memory"),
    Miss.NO_ROOM: ("the engine had no blocks free for a load", ""),
    Miss.SLOWER_THAN_COMPUTING: ("loading was estimated to take longer than computing", "load_policy"),
    Miss.TIER_TOO_SLOW: ("a tier slower than memory did not bring it within promote_deadline", "promote_deadline"),
}
"""Reasons for which a prompt is computed although its blocks are stored, or may be, and the settings that matter."""


class ComputedPrompts:
    """Logs that prompts were computed although they are stored, or may be, and why. Writes one line in ten minutes at
    most, and one when the engine ends, with counts of all such prompts since the line before. Owned by the scheduler's
    thread. Lines have the word kvoffload, because the log of an engine may not show who wrote them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.counts: Counter[Miss] = Counter()
        """Number of prompts since the last line, by reason."""
        self._last = ""
        self._next_line_s = 0.0

    def note(self, request_id: str, reason: Miss, fault: str) -> None:
        """Takes note of why a prompt was computed. `fault` says why the server does not serve, if that is known."""
        if reason in _WHY_COMPUTED:
            self.counts[reason] += 1
            why, setting = _WHY_COMPUTED[reason]
            self._last = f"{request_id}: {why}"
            self._last += f" ({fault})" if fault else ""
            self._last += f"; settings: {setting}" if setting else ""
        if self.counts and self._clock() >= self._next_line_s:
            self.tell()

    def tell(self) -> None:
        """Writes a line about the prompts that were noted since the last line, if there are any."""
        if not self.counts:
            return
        level = logging.INFO if set(self.counts) == {Miss.SLOWER_THAN_COMPUTING} else logging.WARNING
        counts = ", ".join(f"{reason.label} {count}" for reason, count in self.counts.items())
        logger.log(
            level,
            "kvoffload: prompts were computed although they are stored, or may be (%s), the last one by request %s",
            counts,
            self._last,
        )
        self.counts.clear()
        self._next_line_s = self._clock() + LINE_PAUSE_S
