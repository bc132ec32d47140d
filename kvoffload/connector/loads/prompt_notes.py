"""Counts what became of each prompt, tells it to the server, and explains it in the log at debug level."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from kvoffload.client import PromptNote
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.engine.traces import Traces
from kvoffload.connector.loads.judge import LoadJudge
from kvoffload.protocol import Explanation, Miss
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)

LINE_PAUSE_S = 600.0
"""Least number of seconds between two log lines about stored prompts that were computed."""

_WHY_COMPUTED = {
    Miss.NOT_SERVED: "the cache server does not serve this engine at the moment",
    Miss.SLOW_TO_ANSWER: (
        "the cache server did not answer within acquire_deadline, or a quarter of the time that computing takes"
    ),
    Miss.REFUSED: "the cache server gave no lease",
    Miss.NO_ROOM: "the engine had no blocks free for a load",
    Miss.SLOWER_THAN_COMPUTING: "loading was estimated to take longer than computing",
    Miss.TIER_TOO_SLOW: "a tier slower than memory did not bring it within promote_deadline",
}
"""Reasons for which a prompt is computed although its blocks are stored, or may be."""
_NOT_STORED = (Miss.NEVER_SEEN, Miss.TOO_SHORT)


class ComputedPrompts:
    """Logs that prompts were computed although they are stored, or may be, and why. Writes one line in ten minutes at
    most, and one when the engine ends, with counts of all such prompts since the line before. Owned by the scheduler's
    thread."""

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
            why = _WHY_COMPUTED[reason]
            self._last = f"{request_id}: {why}" + (f" ({fault})" if fault else "")
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
            "prompts were computed although they are stored, or may be (%s), the last one by request %s",
            counts,
            self._last,
        )
        self.counts.clear()
        self._next_line_s = self._clock() + LINE_PAUSE_S


class PromptNotes:
    """Counts what became of each prompt, and tells the server and the log. Owned by the scheduler's thread."""

    def __init__(
        self, cache: CacheClient, judge: LoadJudge, measures: Measures, traces: Traces, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._judge = judge
        self._measures = measures
        self._traces = traces
        self._clock = clock
        self._computed = ComputedPrompts(clock)

    def note(
        self, tracked: TrackedRequest, *, local: int, boundary: int, limit: int, reason: Miss, lower: int = 0
    ) -> None:
        """Notes that the engine has the tokens up to `local` itself, that those up to `boundary` were promised, `lower`
        of them from tiers slower than memory, and the reason why the others were not. No token beyond `limit` could
        have been promised."""
        promised, computed = boundary - local, tracked.request.num_tokens - boundary
        saved_ns = promised * self._judge.token_ns
        self._measures.count("kvoffload_queries_total", promised + computed)
        self._measures.count("kvoffload_hits_total", promised - lower, tier="memory")
        self._measures.count("kvoffload_hits_total", lower, tier="lower")
        self._measures.count("kvoffload_misses_total", computed, reason=reason.label)
        self._measures.count("kvoffload_saved_seconds_total", saved_ns / 1e9)
        is_told = logger.isEnabledFor(logging.DEBUG)
        name, why = tracked.request.request_id, reason.label
        if self._computed.counts or reason not in _NOT_STORED:
            fault = ""
            if reason is Miss.NOT_SERVED:
                fault = self._cache.fault or "a rank of the engine has not joined the server's memory yet"
            self._computed.note(name, reason, fault)
        if is_told:
            logger.debug("request %s: %d tokens after the first %d are computed: %s", name, computed, boundary, why)
        asked_s = self._clock() if tracked.asked_s is None else tracked.asked_s
        found: dict[str, int | str] = {"asked": promised + computed, "promised": promised, "lower": lower, "miss": why}
        self._traces.note(tracked.request.trace_headers, "find", self._clock() - asked_s, found)
        session = "" if tracked.was_told else tracked.settings.session
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
                miss=reason,
                session=session,
                on_explained=partial(_log, name) if is_told else None,
            )
        )

    def close(self) -> None:
        """Writes a last line about the prompts that the log was not told of yet, because the engine ends."""
        self._computed.tell()

    def end_load(self, trace: Mapping[str, str] | None, blocks: int, size_bytes: int, seconds: float) -> None:
        """Notes how much a load has brought, and in which time. `trace`: trace headers of its request."""
        self._measures.count("kvoffload_loaded_bytes_total", size_bytes)
        if seconds > 0:
            self._measures.observe("kvoffload_load_bytes_per_second", size_bytes / seconds)
        self._traces.note(trace, "load", seconds, {"blocks": blocks, "bytes": size_bytes})


def _log(request_id: str, explanation: Explanation) -> None:
    """Logs the server's explanation of a miss. The server knows more about it than this process."""
    line = explanation.miss.label
    if explanation.miss is Miss.EVICTED:
        more = describe_size(explanation.missing_bytes)
        line += f" {explanation.seconds_ago} s ago; {more} more memory would have kept it"
    elif explanation.miss in (Miss.UNTRUSTED, Miss.CLEARED):
        line += f" {explanation.seconds_ago} s ago"
    if explanation.differs:
        line += f"; differs: {explanation.differs}"
    logger.debug("request %s: the server says of its first missing block: %s", request_id, line)
