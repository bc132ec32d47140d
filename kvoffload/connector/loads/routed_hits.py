"""What a router promised of a request, beside what was hit."""

from __future__ import annotations

from collections.abc import Container

from kvoffload.connector.measures import Measures
from kvoffload.connector.tracked_request import TrackedRequest


class RoutedHits:
    """Counts once for each request of which something was promised: when it runs first. Owned by the scheduler's
    thread."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._waiting: dict[str, TrackedRequest] = {}

    def add(self, tracked: TrackedRequest) -> None:
        """A request has arrived of which something was promised."""
        self._waiting[tracked.request.request_id] = tracked

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._waiting.pop(request_id, None)

    def settle(self, scheduled: Container[str]) -> None:
        """These requests run now: what they have before their first step they need not compute."""
        if not self._waiting:
            return
        for request_id in [one for one in self._waiting if one in scheduled]:
            tracked = self._waiting.pop(request_id)
            promised = min(tracked.terms.expected_hit_tokens, tracked.request.num_tokens)
            hit = min(tracked.request.num_computed_tokens, promised)
            self._measures.count("kvoffload_routed_expected_tokens_total", promised)
            self._measures.count("kvoffload_routed_hit_tokens_total", hit)
            self._measures.count(
                "kvoffload_routed_requests_total", outcome="as_expected" if hit == promised else "less"
            )
