"""What became of each prompt: counted here, told to the server, and explained in the log at debug level."""

from __future__ import annotations

import logging
from functools import partial

from kvoffload.client import PromptNote
from kvoffload.connector.cache_client import CacheClient
from kvoffload.connector.load_judge import LoadJudge
from kvoffload.connector.measures import Measures
from kvoffload.connector.misses import MissReason
from kvoffload.connector.tracked_request import TrackedRequest
from kvoffload.protocol import Explanation, Miss
from kvoffload.units import format_size

logger = logging.getLogger(__name__)


class PromptNotes:
    """Owned by the scheduler's thread."""

    def __init__(self, cache: CacheClient, judge: LoadJudge, measures: Measures) -> None:
        self._cache = cache
        self._judge = judge
        self._measures = measures

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
                on_explained=partial(_log, name) if is_told else None,
            )
        )


def _log(request_id: str, explanation: Explanation) -> None:
    """What the server knows better."""
    line = explanation.miss.name.lower()
    if explanation.miss is Miss.EVICTED:
        more = format_size(explanation.missing_bytes)
        line += f" {explanation.seconds_ago} s ago; {more} more memory would have kept it"
    elif explanation.miss in (Miss.UNTRUSTED, Miss.CLEARED):
        line += f" {explanation.seconds_ago} s ago"
    if explanation.differs:
        line += f"; differs: {explanation.differs}"
    logger.debug("request %s: the server says of its first missing block: %s", request_id, line)
