"""Counts what became of each prompt, tells it to the server, and explains it in the log at debug level."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvoffload.client import PromptNote
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.receipt import MEMORY, Receipt, Sources
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.engine.traces import Traces
from kvoffload.connector.loads.judge import LoadJudge
from kvoffload.engines.computed_prompts import ComputedPrompts
from kvoffload.protocol import Explanation, Miss
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)

_NOT_STORED = (Miss.NEVER_SEEN, Miss.TOO_SHORT)


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
        self, tracked: TrackedRequest, *, local: int, boundary: int, limit: int, reason: Miss, sources: Sources = ()
    ) -> None:
        """Notes that the engine has the tokens up to `local` itself, that those up to `boundary` were promised, from
        which sources, and the reason why the others were not. No token beyond `limit` could have been promised."""
        lower = sum(tokens for name, tokens in sources if name != MEMORY) if sources else 0
        promised, computed = boundary - local, tracked.request.num_tokens - boundary
        saved_ns = promised * self._judge.token_ns
        saved_s = saved_ns / 1e9
        receipt = Receipt(engine_tokens=local, computed_tokens=computed, sources=sources, saved_s=saved_s)
        if not tracked.request.num_preemptions:
            # After a preemption the request gets back what it had, and vLLM counts its cached tokens once.
            tracked.receipt = receipt
        self._measures.count("kvoffload_queries_total", promised + computed)
        self._measures.count("kvoffload_hits_total", promised - lower, tier="memory")
        self._measures.count("kvoffload_hits_total", lower, tier="lower")
        self._measures.count("kvoffload_misses_total", computed, reason=reason.label)
        self._measures.count("kvoffload_saved_seconds_total", saved_s)
        is_told = logger.isEnabledFor(logging.DEBUG)
        name, why = tracked.request.request_id, reason.label
        if self._computed.counts or reason not in _NOT_STORED:
            fault = ""
            if reason is Miss.NOT_SERVED:
                fault = self._cache.fault or "a rank of the engine has not joined the server's memory yet"
            self._computed.note(name, reason, fault)
        if is_told:
            logger.debug("request %s: %d tokens after the first %d are computed: %s", name, computed, boundary, why)
        if self._traces.has(tracked.request.trace_headers):
            found: dict[str, float | str] = {
                "asked": promised + computed,
                "promised": promised,
                "lower": lower,
                "miss": why,
                **{f"tokens.{source}": tokens for source, tokens in receipt.tokens.items()},
                "saved_seconds": saved_s,
            }
            asked_s = self._clock() if tracked.asked_s is None else tracked.asked_s
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
                tenant=tracked.settings.tenant,
                on_explained=partial(_log, name) if is_told else None,
            )
        )

    def close(self) -> None:
        """Writes a last line about the prompts that the log was not told of yet, because the engine ends."""
        self._computed.tell()

    def end_load(self, tracked: TrackedRequest, blocks: int, size_bytes: int, seconds: float) -> None:
        """Notes how much a request's load has brought, and in which time."""
        if tracked.receipt is not None:
            tracked.receipt = replace(tracked.receipt, loaded_bytes=tracked.receipt.loaded_bytes + size_bytes)
        self._measures.count("kvoffload_loaded_bytes_total", size_bytes)
        if seconds > 0:
            self._measures.observe("kvoffload_load_bytes_per_second", size_bytes / seconds)
        self._traces.note(tracked.request.trace_headers, "load", seconds, {"blocks": blocks, "bytes": size_bytes})


def fail_load(tracked: TrackedRequest) -> None:
    """Notes that a request's load has failed, and its tokens are computed."""
    if tracked.receipt is not None and not tracked.request.num_preemptions:
        tracked.receipt = tracked.receipt.without_load()


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
