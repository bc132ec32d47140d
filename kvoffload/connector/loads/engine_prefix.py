"""How much of a prompt the engine has itself, as far as that shows without touching its blocks, and where prompts
part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.tracked_request import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class EnginePrefix:
    """Owned by the scheduler's thread. Looks at the first group of full attention; without one it finds nothing."""

    def __init__(self, pool: BlockPool, groups: GroupTable) -> None:
        self._pool = pool
        self._groups = groups

    def has(self, block_hashes: Sequence[bytes], boundary: int) -> bool:
        """Whether the engine has the last block before the boundary: then it most likely has those before, too."""
        prefix = self._groups.first_prefix
        if prefix is None or not boundary:
            return False
        name = block_hashes[boundary // self._groups.hash_block_size - 1]
        return self._pool.get_cached_block(name, [self._groups.facts[prefix].index]) is not None  # type: ignore[arg-type]

    def find(self, block_hashes: Sequence[bytes], limit: int) -> int:
        """Returns the longest boundary up to `limit` that the engine has; 0: none."""
        step = self._groups.alignment
        steps = range(1, limit // step + 1)
        return bisect_left(steps, True, key=lambda count: not self.has(block_hashes, count * step)) * step


def find_branch(cache: CacheClient, groups: GroupTable, tracked: TrackedRequest, boundary: int) -> int:
    """Returns the boundary at which this prompt parts from the cached blocks of full attention, if windows were not
    kept there; 0 if it is not beyond `boundary`, where its hit ended."""
    chain = tracked.chain
    if not groups.windows or groups.with_states or not groups.prefixes:
        return 0
    end = chain.tokens
    for group in groups.prefixes:
        block_size = groups.rules[group].block_size
        for stage in (group, *groups.other_stages[group]):
            present = cache.lookup(stage, chain.names(group, range(end // block_size)))
            end = block_size * (len(present) if present.all() else int(present.argmin()))
    end = groups.align(end)
    return end if end > boundary else 0
