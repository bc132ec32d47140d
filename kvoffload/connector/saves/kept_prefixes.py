"""`pin_s`: prefixes of requests that asked for it stay in the cache for a while, by a lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease
from kvoffload.client import PendingAcquire
from kvoffload.connector.cache_client import CacheClient
from kvoffload.connector.group_table import GroupTable

logger = logging.getLogger(__name__)

MAX_KEPT = 64
KEPT_SHARE = 8
"""One part in so many of the pool is kept like this at most: what else is leased has to find room too."""
MAX_STEPS = 400
"""That a prefix waits for its blocks to be saved."""


@dataclass(eq=False)
class _Prefix:
    chain: bytes
    limit: int
    seconds: float
    steps: int = 0
    pending: PendingAcquire | None = None


@dataclass(frozen=True)
class _Kept:
    lease: BlockLease
    size_bytes: int
    end_s: float


class KeptPrefixes:
    """Owned by the scheduler's thread. What is over is released by the first step after that."""

    def __init__(
        self,
        cache: CacheClient,
        groups: GroupTable,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._clock = clock
        self._waiting: list[_Prefix] = []
        self._kept: list[_Kept] = []
        self._refusals = 0

    @property
    def pending(self) -> int:
        """Prefixes that are not leased yet."""
        return len(self._waiting)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def is_quiet(self) -> bool:
        """A step has nothing to lease or to release."""
        return not (self._waiting or self._kept)

    def keep(self, chain: bytes, tokens: int, seconds: float) -> None:
        """A request has ended with so many tokens computed."""
        limit = self._groups.align(tokens)
        if not limit:
            return
        if len(self._waiting) + len(self._kept) >= MAX_KEPT:
            self._refuse(f"there are {MAX_KEPT} already")
            return
        self._waiting.append(_Prefix(chain, limit, seconds))

    def step(self, *, are_saves_pending: bool) -> None:
        """Leases what has been saved, and releases what is over."""
        if self._kept:
            now_s = self._clock()
            here = self._cache.memory_id
            for one in [one for one in self._kept if one.end_s <= now_s or one.lease.memory_id != here]:
                self._kept.remove(one)
                self._cache.release(one.lease)
        for prefix in list(self._waiting):
            prefix.steps += 1
            if prefix.pending is None:
                if are_saves_pending and prefix.steps < MAX_STEPS:
                    continue
                prefix.pending = self._cache.start_acquire(
                    Ask(prefix.chain, limit=prefix.limit, alignment=self._groups.alignment)
                )
            found = self._cache.poll(prefix.pending)
            if found is not None:
                self._waiting.remove(prefix)
                if found.lease is not None:
                    self._hold(found, found.lease, prefix.seconds)

    def let_go(self) -> None:
        """Nothing is worth keeping any more."""
        for prefix in self._waiting:
            if prefix.pending is not None:
                self._cache.cancel(prefix.pending)
        for one in self._kept:
            self._cache.release(one.lease)
        self._waiting.clear()
        self._kept.clear()

    def _hold(self, found: AcquiredBlocks, lease: BlockLease, seconds: float) -> None:
        size_bytes = sum(
            len(leased.addresses) * stored_bytes
            for leased, stored_bytes in zip(found.groups, self._groups.stored_bytes, strict=True)
        )
        room_bytes = self._cache.memory(lease.memory_id).size_bytes // KEPT_SHARE
        if size_bytes + sum(one.size_bytes for one in self._kept) > room_bytes:
            self._cache.release(lease)
            self._refuse(f"they would be more than {room_bytes:,} bytes, 1/{KEPT_SHARE} of the pool")
            return
        self._kept.append(_Kept(lease, size_bytes, self._clock() + seconds))

    def _refuse(self, reason: str) -> None:
        self._refusals += 1
        if self._refusals == 1:
            logger.warning("a prefix is not kept for its pin_s: %s (said once)", reason)
