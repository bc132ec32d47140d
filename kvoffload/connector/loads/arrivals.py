"""Prompts that one engine computes for another: what the other may expect, and how its requests wait for the blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.cache import Ask
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.tracked_request import Arrival, TrackedRequest
from kvoffload.connector.engine.measures import Measures

LOOK_S = 0.05
"""Seconds between questions to slower tiers for a request's blocks. Memory is looked at whenever the engine asks."""


class Arrivals:
    """Owned by the scheduler's thread. A request that expects tokens waits for them once, for at most `wait_s` from its
    arrival; after that the blocks that have come are used, and the rest is computed."""

    def __init__(
        self,
        cache: CacheClient,
        groups: GroupTable,
        *,
        wait_s: float,
        measures: Measures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._wait_s = wait_s
        self._measures = measures
        self._clock = clock

    def are_awaited(self, tracked: TrackedRequest, *, local: int, limit: int) -> bool:
        """Returns whether the request has to wait, so that the caller asks again later. Its hit has at most `limit`
        tokens, of which the engine has `local` itself."""
        arrival = tracked.arrival or Arrival()
        tracked.arrival = arrival
        if arrival.is_over:
            return False
        end = self._find_end(tracked, limit)
        if end <= local:
            return False
        now_s = self._clock()
        if arrival.since_s is None:
            arrival.since_s = now_s
        waited_s = now_s - arrival.since_s
        ask = Ask(tracked.chain.data, local=local, limit=end, alignment=self._groups.alignment)
        is_there = self._cache.find_boundary(ask) >= end
        if not is_there and waited_s < self._wait_s and self._cache.is_served:
            if self._cache.has_tiers and now_s >= arrival.looks_again_s:
                arrival.looks_again_s = now_s + LOOK_S
                self._cache.prefetch(ask)
            return True
        arrival.is_over = True
        self._measures.count("kvoffload_arrivals_total", outcome="arrived" if is_there else "late")
        self._measures.observe("kvoffload_arrival_seconds", waited_s)
        return False

    def _find_end(self, tracked: TrackedRequest, limit: int) -> int:
        """Returns how many tokens have to be there. If a draft model costs the last block of a hit, that block counts
        too, although the request cannot use it."""
        most = limit + (self._groups.dropped_tokens if self._groups.is_all_prefix else 0)
        return self._groups.align(min(tracked.settings.expect_tokens, most, tracked.chain.tokens))


def count_expected(cache: CacheClient, groups: GroupTable, tracked: TrackedRequest) -> int:
    """Returns how many tokens of a request that has ended are saved or being saved, so that another engine may expect
    them."""
    if tracked.is_tainted or tracked.settings.skip_save:
        return 0
    computed = min(tracked.request.num_computed_tokens, tracked.chain.tokens)
    tokens = groups.align(min(computed, tracked.lost_from, tracked.progress.limit))
    if not groups.with_states or not tokens:
        return tokens
    # The engine chooses at which boundaries there are states, and does not hand off again those that it had itself.
    there = cache.find_boundary(Ask(tracked.chain.data, limit=tokens, alignment=groups.alignment))
    return max(there, groups.align(min(tokens, tracked.progress.states_end)))
