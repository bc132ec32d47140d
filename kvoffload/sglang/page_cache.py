"""The part of the client that a rank's linker uses, and the terms on which the linker uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, Placed, Publication, ReservedSlots, SegmentMap
from kvoffload.client import PendingAcquire, PromptNote
from kvoffload.sglang.held_pages import PoolTerms

FULL = 0
"""The group whose pages all are needed, of whatever model."""


class PageCache(Protocol):
    """The part of `Client` that pages need. Only `wait_for` and `acquire_entries` wait, within the step's budget."""

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
    """The sizes and groups of one rank's pages, and how they are checked."""

    page_size: int
    groups: tuple[PoolTerms, ...]
    """The group of all pages comes first."""
    fingerprint: bytes
    """Fingerprint of the rank's identity; digests are made with it."""
    ranks: int = 1
    """Number of ranks of the engine. An engine with one rank may answer that a load failed, and then computes the
    request."""
    verify_always: bool = False

    @property
    def shards(self) -> tuple[int, ...]:
        """Returns the shards whose digests are wanted with a lease."""
        return (0,) if self.verify_always else ()
