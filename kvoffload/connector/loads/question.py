"""The questions to the cache for requests' prompts, and the line in which their hits wait for room in the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvoffload.cache import NO_LIMIT
from kvoffload.client import PendingAcquire
from kvoffload.connector.common.receipt import MEMORY, UNKNOWN
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.protocol import Miss

READY_WAIT_S = 1.0
"""How long a hit may wait for workers to join the memory it lies in, and for other loads to end, in seconds."""


@dataclass(eq=False)
class Question:
    """A question to the cache for a request: at which number of tokens it was asked, and its answer."""

    tracked: TrackedRequest
    local: int
    num_tokens: int
    version: int
    pending: PendingAcquire
    waits_since_s: float | None = None
    room_until_s: float | None = None
    """The time until which the request waits for room; None: it has not lacked room yet."""
    reported: int = 0
    """Number of tokens that were last reported to the engine for a load."""
    miss: Miss | None = None
    """The reason why there is nothing to report; None: there is a hit, or no answer yet."""

    def holds(self, local: int, version: int) -> bool:
        """Whether the answer still holds, or will hold, for an engine that has `local` tokens itself."""
        if self.num_tokens != self.tracked.request.num_tokens or local < self.local:
            return False
        found = self.pending.found
        if found is None:
            return True
        if self.miss is None and found.is_hit:
            # Its blocks are leased, so it holds unless the engine has got further by itself.
            return found.boundary > local
        return self.version == version and self.local == local

    def may_wait(self, now_s: float) -> bool:
        """Whether less than `READY_WAIT_S` has passed since the first call for this question, which comes when the
        engine wants to schedule the request and not at its arrival."""
        if self.waits_since_s is None:
            self.waits_since_s = now_s
        return now_s < self.waits_since_s + READY_WAIT_S

    def find_reaches(self) -> tuple[tuple[str, int], ...]:
        """Returns how far memory and slower tiers reached when the latter were asked, as `split_hit` takes it. They are
        asked once: blocks that they have brought for an earlier question are in memory by now."""
        pending = self.pending
        if pending.promotion is None and self.tracked.reaches:
            return self.tracked.reaches
        # More blocks in memory than they answered were saved since. Without an answer, nothing is known of it.
        is_known = pending.promotion is not None and pending.promotion.answer is not None
        return ((MEMORY, pending.in_memory), *pending.reaches, (MEMORY if is_known else UNKNOWN, NO_LIMIT))


class WaitingLine:
    """Lets one request at a time wait first for room in the engine; hits of other requests wait behind it. The engine
    itself, too, lets no request overtake one whose prompt does not fit. Owned by the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: Question | None = None

    def lets_wait(self, question: Question, wait_s: float) -> bool:
        """Whether a request that lacks room waits for others to end and free their blocks. It waits for `wait_s` at
        most from the first call on, the time that computing its tokens would take: if it has to compute them then, it
        has lost no more than that, whereas a request that computes them at once certainly spends it."""
        now_s = self._clock()
        if question.room_until_s is None:
            question.room_until_s = now_s + wait_s
        if now_s >= question.room_until_s:
            return False
        self._first = self._first or question
        return True

    def is_behind(self, tracked: TrackedRequest, questions: Mapping[str, Question]) -> bool:
        """Whether another request waits for room before this one. `questions` are those that are open."""
        first = self._first
        if first is None or first.tracked is tracked:
            return False
        is_waiting = questions.get(first.tracked.request.request_id) is first and not first.reported
        if is_waiting and first.room_until_s is not None and self._clock() < first.room_until_s:
            return True
        self._first = None
        return False
