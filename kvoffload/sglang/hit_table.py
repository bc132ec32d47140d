"""Hits that requests were told of and have not loaded yet. Leases keep them in memory until the requests load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease
from kvoffload.client import Client, PromptNote
from kvoffload.engines.computed_prompts import ComputedPrompts
from kvoffload.hash_rows import choose_rows
from kvoffload.protocol import Miss
from kvoffload.sglang.asked_prompts import AskedPrompts
from kvoffload.sglang.held_pages import HeldPages, list_lengths
from kvoffload.sglang.linker_metrics import LinkerMetrics
from kvoffload.sglang.page_settings import FULL, PageSettings
from kvoffload.types import HASH_BYTES

MAX_HELD = 256
"""Hits that are leased and not loaded yet."""
HELD_S = 30.0
"""A request that has not come to load what it was told of by then has ended, or asks again."""
MAX_OTHER_PAGES = 256
"""How many pages of each group are leased for windows that end before the longest length, because ranks may agree on a
shorter one."""
LOOK_BELOW_S = 0.05
"""How often slower tiers are asked for what a request waits for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Hit:
    """The pages that a request was told of, and the leases that keep them in memory."""

    asked: bytes
    names: bytes
    """Names of the pages up to the hit's longest length."""
    leases: tuple[BlockLease, ...]
    """All of one memory."""
    groups: tuple[HeldPages, ...]
    lengths: list[int]
    until_s: float


class HitTable:
    """Owned by the scheduler's thread. It holds `MAX_HELD` hits at most, and each for `HELD_S`."""

    def __init__(
        self,
        settings: PageSettings,
        cache: Client,
        *,
        clock: Callable[[], float],
        metrics: LinkerMetrics | None = None,
    ) -> None:
        self._computed = ComputedPrompts(clock)
        self.prompts = AskedPrompts(
            self._tell_prompt, page_size=settings.page_size, note_computed=self._note_computed_prompt
        )
        self._metrics = metrics
        self._settings = settings
        self._cache = cache
        self._clock = clock
        self._looked_below: dict[str, float] = {}
        """By request, when slower tiers were asked for it last; the longest ago first."""
        self._hits: dict[str, Hit] = {}
        """By request, the one that was told longest ago first."""

    def find(self, rid: str, names: bytes, *, is_counted: bool = True) -> list[int]:
        """Every number of pages, from the first on, that is held for this request from here on.

        `is_counted`: the server hears of it as a prompt.
        """
        self.drop_old()
        former = self._hits.get(rid)
        if former is not None and self._is_still_longest(former, names):
            # A request that waits for room is looked up in every step.
            self._hits[rid] = replace(self._hits.pop(rid), until_s=self._clock() + HELD_S)
            self._look_below(rid, names, former.lengths[-1])
            self.prompts.note_again(rid, self._clock())
            return former.lengths
        self.drop(rid)
        hit, miss = self._acquire(names)
        if hit is not None:
            self._hits[rid] = hit
        lengths = [] if hit is None else hit.lengths
        pages, found = len(names) // HASH_BYTES, lengths[-1] if lengths else 0
        self._look_below(rid, names, found)
        if is_counted:
            self.prompts.note(rid, names, pages=pages, found=found, miss=miss, now_s=self._clock())
        return lengths

    def take(self, rid: str) -> Hit | None:
        """Removes a request's hit and returns it. The caller must release it."""
        return self._hits.pop(rid, None)

    def release(self, hit: Hit) -> None:
        for lease in hit.leases:
            self._cache.release(lease)

    def drop(self, rid: str) -> None:
        hit = self.take(rid)
        if hit is not None:
            self.release(hit)

    def drop_all(self) -> None:
        for rid in list(self._hits):
            self.drop(rid)

    def close(self) -> None:
        """Gives all hits back, and writes a last line about the prompts that the log was not told of yet."""
        self.drop_all()
        self._computed.tell()

    def drop_old(self) -> None:
        """Drops hits whose requests have not come, and the oldest where there are too many."""
        now_s = self._clock()
        while self._hits:
            rid, hit = next(iter(self._hits.items()))
            if len(self._hits) < MAX_HELD and now_s < hit.until_s:
                return
            self.drop(rid)

    def _tell_prompt(self, note: PromptNote) -> None:
        if self._settings.rank != 0:
            return
        self._cache.note_prompt(note)
        if self._metrics is not None:
            self._metrics.count_prompt(note)

    def _note_computed_prompt(self, rid: str, miss: Miss) -> None:
        self._computed.note(rid, miss, self._cache.fault if miss is Miss.NOT_SERVED else "")

    def _acquire(self, names: bytes) -> tuple[Hit | None, Miss]:
        """Acquires these pages. Returns the hit, and the reason why it has no more pages."""
        ask = Ask(names, alignment=self._settings.page_size, shards=self._settings.shards)
        pending = self._cache.start_acquire(ask)
        found = self._cache.wait_for(pending)
        if found is None:
            self._cache.cancel(pending)
            return None, Miss.SLOW_TO_ANSWER
        if found.lease is None:
            return None, Miss.NEVER_SEEN if self._cache.is_served else Miss.NOT_SERVED
        if not self._cache.may_copy(found.lease):
            self._cache.release(found.lease)
            return None, Miss.NOT_SERVED
        return self._hold(names, found.lease, found), Miss.NEVER_SEEN

    def _look_below(self, rid: str, names: bytes, pages: int) -> None:
        """Asks for a prefetch of the pages after these. This request finds them if it has to wait, and the next one
        does too."""
        now_s = self._clock()
        is_due = now_s >= self._looked_below.get(rid, now_s - LOOK_BELOW_S) + LOOK_BELOW_S
        if pages * HASH_BYTES >= len(names) or not self._cache.has_tiers or not is_due:
            return
        self._looked_below.pop(rid, None)
        self._looked_below[rid] = now_s
        if len(self._looked_below) > MAX_HELD:
            self._looked_below.pop(next(iter(self._looked_below)))
        self._cache.prefetch(Ask(names, local=pages * self._settings.page_size))

    def _hold(self, names: bytes, lease: BlockLease, found: AcquiredBlocks) -> Hit:
        pages = found.boundary // self._settings.page_size
        groups = tuple(HeldPages.of(pages, group) for group in found.groups)
        leases = [lease]
        if self._settings.ranks > 1:
            leases += self._hold_other_windows(names[: pages * HASH_BYTES], lease, groups)
        return Hit(
            asked=names,
            names=names[: pages * HASH_BYTES],
            leases=tuple(leases),
            groups=groups,
            lengths=list_lengths(self._settings.groups, [group.is_held for group in groups]),
            until_s=self._clock() + HELD_S,
        )

    def _hold_other_windows(self, names: bytes, lease: BlockLease, groups: Sequence[HeldPages]) -> list[BlockLease]:
        leases = []
        for number, held in enumerate(groups):
            if not self._settings.groups[number].trailing_pages:
                continue
            positions = np.flatnonzero(self._cache.lookup(number, names) & ~held.is_held)[-MAX_OTHER_PAGES:]
            if not len(positions):
                continue
            found = self._cache.acquire_entries(number, choose_rows(names, positions), shards=self._settings.shards)
            if found.lease is None:
                continue
            if found.lease.memory_id != lease.memory_id:
                self._cache.release(found.lease)
                continue
            held.add(positions, found.groups[0])
            leases.append(found.lease)
        return leases

    def _is_still_longest(self, hit: Hit, names: bytes) -> bool:
        """Nothing has come meanwhile that would make it longer."""
        if hit.asked != names or not all(self._cache.may_copy(lease) for lease in hit.leases):
            return False
        following = names[len(hit.names) :]
        if len(self._settings.groups) == 1:
            following = following[:HASH_BYTES]
        if not following or not self._cache.lookup(FULL, following)[0]:
            return True
        there = [self._cache.lookup(group, names) for group in range(len(self._settings.groups))]
        return list_lengths(self._settings.groups, there)[-1:] == hit.lengths[-1:]
