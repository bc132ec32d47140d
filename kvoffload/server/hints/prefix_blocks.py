"""The blocks that a load up to a boundary needs, by group, and how many of them were loaded since a given time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LocalCache, find_reach, needed_blocks
from kvoffload.hash_rows import as_rows, find_first
from kvoffload.server.tiering.seen import bound_tokens, count_looks
from kvoffload.server.tiering.settings import TierSpace
from kvoffload.types import HASH_BYTES

_LOOKED_AT = 64
"""Number of blocks of each group that are checked."""
COUNTED_BLOCKS = 4096
"""Number of blocks of a prefix for which it is counted whether they were loaded. Of a longer one it is estimated, by as
many blocks at equal distances."""


@dataclass(frozen=True, kw_only=True)
class PrefixBlocks:
    """The blocks that a load of a prefix needs, or those of them that were missing. Groups without blocks are left
    out."""

    space: TierSpace
    tokens: int
    """Length of the prefix, in tokens."""
    parts: tuple[tuple[int, bytes], ...]
    """Each group's number, and the names of its blocks."""

    @property
    def size_bytes(self) -> int:
        return sum(len(hashes) // HASH_BYTES * self.space.block_bytes(group) for group, hashes in self.parts)

    @property
    def count(self) -> int:
        return sum(len(hashes) // HASH_BYTES for _, hashes in self.parts)

    def cut_slices(self, size: int) -> Iterator[tuple[int, bytes]]:
        """Yields the blocks in slices of at most so many: a group's number, and the names of its blocks."""
        for group, hashes in self.parts:
            for first in range(0, len(hashes), size * HASH_BYTES):
                yield group, hashes[first : first + size * HASH_BYTES]

    def count_used(self, cache: LocalCache, *, since: int) -> int:
        """Returns how many tokens of it were loaded since the cache's `use_clock` was `since`, counted in the group
        with the most."""
        step = -(-self.count // COUNTED_BLOCKS)
        most = 0
        for group, hashes in self.parts:
            names = as_rows(hashes)[::step].tobytes()
            used = int(cache.find_used(self.space.number, group, names, since=since).sum())
            most = max(most, used * step * self.space.rules[group].block_size)
        return min(most, self.tokens)

    def was_used(self, cache: LocalCache, *, since: int) -> bool:
        """Whether any of it was loaded since then, as far as its first blocks tell: a load of a prefix begins with
        these."""
        return any(
            cache.find_used(self.space.number, group, hashes[: _LOOKED_AT * HASH_BYTES], since=since).any()
            for group, hashes in self.parts
        )


@dataclass(eq=False)
class Prefix:
    """A prompt's blocks by group, up to the tokens that the hint means."""

    space: TierSpace
    chain: bytes
    limit: int
    is_cut: bool = field(init=False)
    """Whether it is longer than what a request may cost. Only its beginning is looked for then."""

    def __post_init__(self) -> None:
        every = min(self.limit, len(self.chain) // HASH_BYTES * self.space.geometry.hash_block_size)
        self.limit = min(every, bound_tokens(self.space))
        self.is_cut = self.limit < every
        self.rows = self.space.chain_rows_of(self.chain, self.limit)

    @property
    def looks(self) -> int:
        """Number of looks that it takes to find it."""
        return count_looks(self.space, self.rows)

    def find_reach(self, there: Sequence[npt.NDArray[np.bool_]], *, limit: int | None = None) -> int:
        """Returns the boundary up to which a load would reach with what is there; 0: there is none."""
        return find_reach(self.space.rules, there, local=0, limit=self.limit if limit is None else limit)

    @property
    def most(self) -> int:
        """The boundary that a load would reach if all blocks were there."""
        return self.find_reach([np.ones(len(rows), np.bool_) for rows in self.rows])

    def cut(self, boundary: int, lacking: Sequence[npt.NDArray[np.bool_]] | None = None) -> PrefixBlocks:
        """Returns the blocks that a load up to a boundary needs, or with `lacking` those of them that are lacking. No
        block is named twice."""
        parts = []
        for group, rule in enumerate(self.space.rules):
            needed = needed_blocks(rule, local=0, boundary=boundary)
            rows = self.rows[group][needed.start : needed.stop]
            if lacking is not None:
                rows = rows[lacking[group][needed.start : needed.stop]]
            if (first := find_first(rows)) is not None:
                rows = rows[first]
            if len(rows):
                parts.append((group, rows.tobytes()))
        return PrefixBlocks(space=self.space, tokens=boundary, parts=tuple(parts))

    def name(self, boundary: int) -> bytes:
        """Returns the name of the prefix that ends at a boundary: that of its last hash."""
        end = boundary // self.space.geometry.hash_block_size * HASH_BYTES
        return self.chain[end - HASH_BYTES : end]
