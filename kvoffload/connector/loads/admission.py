"""A guard against a deadlock in the engine's own reservation for asynchronous loads.

vLLM admits an asynchronous load when its blocks fit in addition to those that other requests have reserved, but it
counts null blocks before a sliding window or a recurrent state as held. With a small cache, requests that were loaded
and wait for their first step then hold all blocks, none may be preempted, and nothing moves. So a hit is not reported
unless the request and every loaded one before it can get all the blocks that their whole prompts need.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


class LoadAdmission:
    """Owned by the scheduler's thread."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = tuple(block_sizes)
        self._rest: dict[str, int] = {}

    @property
    def reserved(self) -> tuple[str, ...]:
        """The requests whose load was planned and which have not run since."""
        return tuple(self._rest)

    def admits(self, *, num_tokens: int, first_blocks: Sequence[int], free_blocks: int) -> bool:
        """Returns whether a load may be reported. `first_blocks` is each group's first block that will not be null."""
        return self.count_needed(num_tokens, first_blocks) + sum(self._rest.values()) <= free_blocks

    def count_needed(self, num_tokens: int, first_blocks: Sequence[int]) -> int:
        """Returns how many blocks of all groups a whole prompt needs, with one more of each group."""
        return sum(
            ceil(num_tokens / size) + 1 - first for size, first in zip(self._block_sizes, first_blocks, strict=True)
        )

    def reserve(self, request_id: str, *, num_tokens: int, boundary: int) -> None:
        """Reserves the blocks that the request still needs after its load, until it is scheduled or gone."""
        self._rest[request_id] = sum(ceil(num_tokens / size) + 1 - boundary // size for size in self._block_sizes)

    def settle(self, request_id: str) -> None:
        """Ends the reservation of a request that runs or has ended: now the engine counts its blocks itself."""
        self._rest.pop(request_id, None)
