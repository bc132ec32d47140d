"""Requests that the engine is about to preempt: what they have decoded is saved before it gives their blocks away."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.saves.worth import Candidates, SaveWorth
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState


class LeavingRequests:
    """Owned by the scheduler's thread. The next plan takes the requests, and saves their blocks whatever the policy:
    they will come back for these."""

    def __init__(self, cache: CacheClient, groups: GroupTable, worth: SaveWorth) -> None:
        self._cache = cache
        self._groups = groups
        self._worth = worth
        self._requests: list[TrackedRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, tracked: TrackedRequest, on_the_way: Sequence[Collection[int]]) -> bool:
        """Adds a request if it has full blocks that are neither saved nor `on_the_way`, and returns whether it has.
        Blocks are looked at once."""
        groups = self._groups
        tracked.chain.follow(tracked.request.block_hashes)
        tokens = min(tracked.request.num_computed_tokens, tracked.chain.tokens, tracked.progress.limit)
        if groups.with_states:
            tokens = min(tokens, tracked.progress.states_end)
        tokens = groups.align(tokens)
        if tokens <= tracked.kept_tokens:
            return False
        tracked.kept_tokens = tokens
        is_lacking = groups.windows or any(
            self._find_missing(tracked, group, tokens).difference(on_the_way[group]) for group in groups.prefixes
        )
        if is_lacking:
            self._requests.append(tracked)
        return bool(is_lacking)

    def collect(
        self, requests: Collection[str], scheduled: Mapping[str, int], state: KVConnectorBlockState
    ) -> list[Candidates]:
        """Takes the requests that are still there, and returns all their blocks, as if none had been looked at."""
        taken, self._requests = self._requests, []
        found: list[Candidates] = []
        for tracked in taken:
            request, former = tracked.request, tracked.progress
            if request.request_id not in requests:
                continue
            tables = vllm_compat.block_tables(state, request.request_id, is_left_out=True)
            if tables is None:
                continue
            tracked.progress = self._worth.begin(prompt_tokens=request.num_prompt_tokens, limit=former.limit)
            tracked.progress.states_end = former.states_end
            tracked.chain.follow(request.block_hashes)
            full = min(request.num_computed_tokens + scheduled.get(request.request_id, 0), tracked.chain.tokens)
            self._worth.note_end(tracked.progress, full)
            found += self._worth.collect(tracked, full, tables)
        return found

    def _find_missing(self, tracked: TrackedRequest, group: int, tokens: int) -> set[int]:
        """Returns the first words of the names of blocks that the cache lacks."""
        names = tracked.chain.names(group, range(tokens // self._groups.rules[group].block_size))
        words = np.frombuffer(names, np.uint64)[:: HASH_BYTES // 8]
        return set(words[~self._cache.lookup(group, names)].tolist())
