"""What a rank's linker needs of its cache, and what it is given with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, Placed, Publication, ReservedSlots, SegmentMap
from kvoffload.client import PendingAcquire, PromptNote
from kvoffload.sglang.held_pages import GroupTerms

FULL = 0
"""The group whose pages all are needed, of whatever model."""


class PageCache(Protocol):
    """Is the part of `Client` that pages need; nothing here waits but `wait_for` and `acquire_entries`, within the
    step's budget."""

    @property
    def is_served(self) -> bool: ...
    @property
    def has_tiers(self) -> bool: ...
    def begin_step(self) -> None: ...
    def memory(self, memory_id: int) -> SegmentMap: ...
    def may_copy(self, held: Placed) -> bool: ...
    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...
    def start_acquire(self, ask: Ask) -> PendingAcquire: ...
    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks: ...
    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None: ...
    def cancel(self, pending: PendingAcquire) -> None: ...
    def prefetch(self, ask: Ask) -> None: ...
    def release(self, lease: BlockLease) -> None: ...
    def ready_slots(self) -> list[int]: ...
    def take(self, group: int, count: int) -> ReservedSlots: ...
    def publish(self, publication: Publication) -> bool: ...
    def abort(self, slots: ReservedSlots) -> None: ...
    def invalidate(self, group: int, hashes: Buffer) -> None: ...
    def note_prompt(self, note: PromptNote) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PageTerms:
    """What one rank is given."""

    page_size: int
    groups: tuple[GroupTerms, ...]
    """First that of all pages."""
    fingerprint: bytes
    """Of its identity; digests are made with it."""
    ranks: int = 1
    """Of the engine. One alone may answer that a load failed: then the engine computes the request."""
    verify_always: bool = False

    @property
    def shards(self) -> tuple[int, ...]:
        """Whose digests are wanted with a lease."""
        return (0,) if self.verify_always else ()
