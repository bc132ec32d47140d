"""What prefetches of one domain brought to memory and nobody has loaded yet. It is bounded: others gave way to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from kvoffload.cache import LocalCache
from kvoffload.server.hints.prefix_blocks import PrefixBlocks
from kvoffload.server.shares import PARTS, has_share

PREFETCHED_SHARE = 0.125
"""Of the memory, that prefetched blocks may take before they are loaded; nobody gets all of it."""
MAX_PREFETCHED = 1024
"""Prefixes at a time; nobody gets all."""
MAX_COMING = 64
"""Of them, that come at a time: a tier serves no more than some requests at once, and engines wait for theirs. Nobody
gets all of these either."""
LOOKED_AT_ONCE = 64
"""Prefixes of which is asked at a time whether anybody has loaded them."""
UNUSED_S = 60.0
"""What nobody has loaded by then is counted as unused, and is not part of the share any more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefetched:
    """Blocks that were lacking, and came or come up."""

    payer: str
    blocks: PrefixBlocks
    tokens: int
    """By which they make a hit longer."""
    since: int
    """The cache's `use_clock` before they came."""
    ends_s: float


@dataclass(eq=False)
class Prefetches:
    """Belongs to the thread of the server's core."""

    tokens: Counter[str]
    """By what came of them: `hit_prefetched` or `unused_prefetched`."""
    _unused: list[Prefetched] = field(default_factory=list)
    """The one that is looked at next comes first."""
    _coming: Counter[str] = field(default_factory=Counter)
    """By payer."""

    def find_room(self, cache: LocalCache, payer: str) -> int:
        """How many bytes may be brought up for somebody now."""
        own = sum(one.payer == payer for one in self._unused)
        if not (
            has_share(own, total=len(self._unused), limit=MAX_PREFETCHED)
            and has_share(self._coming[payer], total=self._coming.total(), limit=MAX_COMING)
        ):
            return 0
        limit_bytes = int(cache.ready_bytes * PREFETCHED_SHARE)
        sizes = [(one.payer == payer, one.blocks.size_bytes) for one in self._unused]
        left = limit_bytes - sum(size for _, size in sizes)
        of_payer = sum(size for is_own, size in sizes if is_own)
        # As `has_share` has it, of bytes: what may come so that it is at most PARTS times what is left then.
        return max(min(left, (PARTS * left - of_payer) // (PARTS + 1)), 0)

    def begin(self, prefetched: Prefetched) -> None:
        """Some of it comes now, until `note_over`."""
        self._unused.append(prefetched)
        self._coming[prefetched.payer] += 1

    def note_over(self, prefetched: Prefetched, *, came: bool) -> None:
        """Nothing more comes of it; and if nothing `came`, none is there to be loaded."""
        self._coming[prefetched.payer] -= 1
        self._coming += Counter()
        if not came and prefetched in self._unused:
            self._unused.remove(prefetched)

    def advance(self, cache: LocalCache, now_s: float) -> None:
        """Counts what was loaded, and what nobody came for, of those whose turn it is."""
        left = self._unused[LOOKED_AT_ONCE:]
        for one in self._unused[:LOOKED_AT_ONCE]:
            if one.blocks.was_used(cache, since=one.since):
                self.tokens["hit_prefetched"] += one.tokens
            elif one.ends_s <= now_s:
                self.tokens["unused_prefetched"] += one.tokens
            else:
                left.append(one)
        self._unused = left

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Blocks of these identities are to go."""
        self._unused = [one for one in self._unused if one.blocks.space.number not in name_spaces]
