"""What became of each prompt: counted here, told to the server, and explained in the log at debug level."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial

from kvoffload.client import PromptNote
from kvoffload.connector.cache_client import CacheClient
from kvoffload.connector.engine.traces import Traces
from kvoffload.connector.loads.judge import LoadJudge
from kvoffload.connector.measures import Measures
from kvoffload.connector.tracked_request import TrackedRequest
from kvoffload.protocol import Explanation, Miss
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)


class MissReason(StrEnum):
    """Says why a request's prompt was not restored, in the words of metrics and log lines."""

    NEVER_SEEN = "never_seen"
    TOO_SHORT = "too_short"
    NOT_SERVED = "not_served"
    REFUSED = "refused"
    SLOW_TO_ANSWER = "slow_to_answer"
    NO_ROOM = "no_room"
    SLOWER_THAN_COMPUTING = "slower_than_computing"
    TIER_TOO_SLOW = "tier_too_slow"
    SKIPPED = "skipped"


class PromptNotes:
    """Owned by the scheduler's thread."""

    def __init__(
        self, cache: CacheClient, judge: LoadJudge, measures: Measures, traces: Traces, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._judge = judge
        self._measures = measures
        self._traces = traces
        self._clock = clock

    def note(
        self, tracked: TrackedRequest, *, local: int, boundary: int, limit: int, reason: MissReason, lower: int = 0
    ) -> None:
        """Tokens up to `local` are the engine's own, those up to `boundary` were promised, `lower` of them from below
        memory; why the others were not. None beyond `limit` could have been."""
        promised, computed = boundary - local, tracked.request.num_tokens - boundary
        saved_ns = promised * self._judge.token_ns
        self._measures.count("kvoffload_queries_total", promised + computed)
        self._measures.count("kvoffload_hits_total", promised - lower, tier="memory")
        self._measures.count("kvoffload_hits_total", lower, tier="lower")
        self._measures.count("kvoffload_misses_total", computed, reason=reason.value)
        self._measures.count("kvoffload_saved_seconds_total", saved_ns / 1e9)
        is_told = logger.isEnabledFor(logging.DEBUG)
        name, why = tracked.request.request_id, reason.value
        if is_told:
            logger.debug("request %s: %d tokens after the first %d are computed: %s", name, computed, boundary, why)
        asked_s = self._clock() if tracked.asked_s is None else tracked.asked_s
        found: dict[str, int | str] = {"asked": promised + computed, "promised": promised, "lower": lower, "miss": why}
        self._traces.note(tracked.request.trace_headers, "find", self._clock() - asked_s, found)
        session = "" if tracked.was_told else tracked.terms.session
        tracked.was_told = True
        self._cache.note_prompt(
            PromptNote(
                chain=tracked.chain.data,
                local=local,
                tokens=tracked.request.num_tokens,
                boundary=boundary,
                limit=limit,
                lower=lower,
                saved_us=saved_ns // 1000,
                miss=Miss[reason.name],
                session=session,
                on_explained=partial(_log, name) if is_told else None,
            )
        )

    def end_load(self, trace: Mapping[str, str] | None, blocks: int, size_bytes: int, seconds: float) -> None:
        """A load has brought so much. `trace`: its request's headers."""
        self._measures.count("kvoffload_loaded_bytes_total", size_bytes)
        if seconds > 0:
            self._measures.observe("kvoffload_load_bytes_per_second", size_bytes / seconds)
        self._traces.note(trace, "load", seconds, {"blocks": blocks, "bytes": size_bytes})


def _log(request_id: str, explanation: Explanation) -> None:
    """Logs what the server knows better than this process."""
    line = explanation.miss.name.lower()
    if explanation.miss is Miss.EVICTED:
        more = describe_size(explanation.missing_bytes)
        line += f" {explanation.seconds_ago} s ago; {more} more memory would have kept it"
    elif explanation.miss in (Miss.UNTRUSTED, Miss.CLEARED):
        line += f" {explanation.seconds_ago} s ago"
    if explanation.differs:
        line += f"; differs: {explanation.differs}"
    logger.debug("request %s: the server says of its first missing block: %s", request_id, line)
