"""Blocks that prefetches of one domain brought to memory and no request has loaded yet. Their share is bounded, because
other blocks give way to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from kvoffload.cache import LocalCache
from kvoffload.server.common.shares import PARTS, has_share
from kvoffload.server.hints.prefix_blocks import PrefixBlocks

PREFETCHED_SHARE = 0.125
"""Share of the memory that prefetched blocks may take before they are loaded. No payer can take all of it."""
MAX_PREFETCHED = 1024
"""Number of prefetched prefixes that are kept track of at a time. No payer can take all of them."""
MAX_COMING = 64
"""Number of prefixes that tiers bring up at a time: a tier serves only a few requests at once, and engines wait for
theirs. No payer can take all of them."""
LOOKED_AT_ONCE = 64
"""Number of prefixes for which one call checks whether a request has loaded them."""
UNUSED_S = 60.0
"""Seconds after which a prefix that no request has loaded is counted as unused, and leaves the share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefetched:
    """Blocks that memory lacked, and that were brought up or are on their way."""

    payer: str
    blocks: PrefixBlocks
    tokens: int
    """Number of tokens by which they make a hit longer."""
    since: int
    """The cache's `use_clock` before they came."""
    ends_s: float


@dataclass(eq=False)
class Prefetches:
    """Belongs to the thread of the server's core."""

    tokens: Counter[str]
    """Number of prefetched tokens by what came of them: `hit_prefetched` or `unused_prefetched`."""
    _unused: list[Prefetched] = field(default_factory=list)
    """Prefixes that no request has loaded yet. The one that is checked next comes first."""
    _coming: Counter[str] = field(default_factory=Counter)
    """Number of prefixes on their way, by payer."""

    def find_room(self, cache: LocalCache, payer: str) -> int:
        """Returns how many bytes may be brought up for this payer now."""
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
        # The rule of `has_share`, in bytes: as much as may come so that it is at most PARTS times what is left then.
        return max(min(left, (PARTS * left - of_payer) // (PARTS + 1)), 0)

    def begin(self, prefetched: Prefetched) -> None:
        """Notes that some of it is on its way, until `note_over`."""
        self._unused.append(prefetched)
        self._coming[prefetched.payer] += 1

    def note_over(self, prefetched: Prefetched, *, came: bool) -> None:
        """Notes that no more of it comes. If nothing `came`, there is nothing to be loaded, and it is forgotten."""
        self._coming[prefetched.payer] -= 1
        self._coming += Counter()
        if not came and prefetched in self._unused:
            self._unused.remove(prefetched)

    def advance(self, cache: LocalCache, now_s: float) -> None:
        """Checks the next prefixes: counts those that were loaded, and those that no request came for in time."""
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
        """Forgets the prefixes of these identities, whose blocks are about to go."""
        self._unused = [one for one in self._unused if one.blocks.space.number not in name_spaces]
