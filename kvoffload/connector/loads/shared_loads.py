"""Requests that wait for another request's load: one loads the prefix that they have in common, and when its load has
ended, the others have the engine's own hit."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import dataclass

from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.types import HASH_BYTES

LEAST_PART = 1 / 4
"""A request waits if it has at least this part of the load in common with it, and if that is at least this part of what
it would load itself. So it waits for little else, and there is enough that it need not load."""
LEAST_WAIT_S = 1.0
"""A request waits for so many seconds, or for as long as computing the shared tokens takes if that is longer."""
MAX_LOADS = 3
"""Maximum number of loads for which a request waits, one after the other, if none of them brings it tokens."""


@dataclass(eq=False)
class _SharedLoad:
    chain: BlockChain
    tokens: int
    """Number of tokens that it brings."""
    boundary: int
    is_open: bool = True
    """Whether it is still on its way, and the engine will keep its blocks."""


@dataclass(eq=False)
class _Wait:
    load: _SharedLoad
    end: int
    """Number of tokens that the engine will have when the load has ended."""
    until_s: float
    loads: int = 1
    """Number of loads that were waited for so far."""


class SharedLoads:
    """Owned by the scheduler's thread. No request waits for one that waits: only loads on their way are waited for,
    each of which ends by itself, and only until `_Wait.until_s`."""

    def __init__(self, groups: GroupTable, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._groups = groups
        self._clock = clock
        self._loads: dict[str, _SharedLoad] = {}
        """The loads on their way, by request."""
        self._waits: dict[str, _Wait] = {}
        """The wait of each request that has waited since it last got blocks."""

    @property
    def is_used(self) -> bool:
        """Whether there is a load on its way, or a request that has waited for one."""
        return bool(self._loads or self._waits)

    @property
    def waiting(self) -> int:
        """Number of requests that wait, or have waited and did not get blocks yet."""
        return len(self._waits)

    def begin(self, request_id: str, chain: BlockChain, *, local: int, boundary: int) -> None:
        """Notes that a load has begun, of the tokens from `local` to `boundary`."""
        self._loads[request_id] = _SharedLoad(chain, boundary - local, boundary)

    def end(self, request_id: str) -> None:
        """Ends a load that was reported, or whose blocks the engine will not keep because its request was aborted."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.is_open = False

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended, with its load."""
        self.end(request_id)
        self._waits.pop(request_id, None)

    def settle(self, running: Container[str]) -> None:
        """Forgets the waits of requests that run now."""
        for request_id in [name for name in self._waits if name in running]:
            del self._waits[request_id]

    def are_awaited(
        self, request_id: str, chain: BlockChain, *, local: int, limit: int, found: int, token_ns: int
    ) -> bool:
        """Returns whether the request waits for a load, so that the caller asks again later. The engine has its first
        `local` tokens, and a hit may have `limit`; it would load those up to `found`, or 0 if that is not known."""
        wait = self._waits.get(request_id)
        if wait is not None and local >= wait.end:
            del self._waits[request_id]
            wait = None
        if wait is not None:
            if self._clock() >= wait.until_s:
                return False
            if wait.load.is_open:
                return True
            if wait.loads == MAX_LOADS:
                return False
        end, load = local, None
        for one in self._loads.values():
            one_end = self._find_end(one, chain, limit)
            if one_end > end and one_end - local >= LEAST_PART * one.tokens:
                end, load = one_end, one
        shared = end - local
        if load is None or shared < LEAST_PART * (found - local):
            return False
        if wait is None:
            until_s = self._clock() + max(LEAST_WAIT_S, shared * token_ns / 1e9)
            self._waits[request_id] = _Wait(load, end, until_s)
        else:
            wait.load, wait.end, wait.loads = load, end, wait.loads + 1
        return True

    def _find_end(self, load: _SharedLoad, chain: BlockChain, limit: int) -> int:
        """Returns how many tokens of a request the engine will have when the load has ended. A window or a state is
        loaded for the load's boundary alone, so with these the request has all of the load or nothing."""
        groups = self._groups
        if groups.dropped_tokens and not groups.is_all_prefix:
            return 0  # the engine then needs more of a window than was loaded
        end = min(load.boundary, limit + groups.dropped_tokens, load.chain.tokens, chain.tokens)
        if not _is_same(load.chain.data, chain.data, end // groups.hash_block_size):
            hashes = range(1, end // groups.hash_block_size + 1)
            same = bisect_left(hashes, True, key=lambda count: not _is_same(load.chain.data, chain.data, count))
            end = groups.align(same * groups.hash_block_size)
        if end < load.boundary and not groups.is_all_prefix:
            return 0
        return groups.drop(end)


def _is_same(one: bytes, other: bytes, count: int) -> bool:
    """Whether two chains of hashes have the first `count` in common: each hash covers all before it."""
    part = slice((count - 1) * HASH_BYTES, count * HASH_BYTES)
    return one[part] == other[part]
