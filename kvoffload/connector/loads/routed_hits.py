"""Compares the hits that a router expected with those that requests had."""

from __future__ import annotations

from collections.abc import Container

from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine.measures import Measures


class RoutedHits:
    """Counts each request for which a router expected a hit once, when it first runs. Owned by the scheduler's
    thread."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._waiting: dict[str, TrackedRequest] = {}

    def add(self, tracked: TrackedRequest) -> None:
        """Takes a request that has arrived with an expected hit."""
        self._waiting[tracked.request.request_id] = tracked

    def forget(self, request_id: str) -> None:
        """Removes a request that has ended."""
        self._waiting.pop(request_id, None)

    def settle(self, scheduled: Container[str]) -> None:
        """Counts those of the requests that run their first step now: tokens that they have before it are hits."""
        if not self._waiting:
            return
        for request_id in [one for one in self._waiting if one in scheduled]:
            tracked = self._waiting.pop(request_id)
            promised = min(tracked.settings.expected_hit_tokens, tracked.request.num_tokens)
            hit = min(tracked.request.num_computed_tokens, promised)
            self._measures.count("kvoffload_routed_expected_tokens_total", promised)
            self._measures.count("kvoffload_routed_hit_tokens_total", hit)
            self._measures.count(
                "kvoffload_routed_requests_total", outcome="as_expected" if hit == promised else "less"
            )
