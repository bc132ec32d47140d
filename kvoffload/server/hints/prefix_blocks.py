"""The blocks that a load up to a boundary needs, by group, and how many of them were loaded since a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LocalCache, find_reach, needed_blocks
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.terms import TierSpace
from kvoffload.types import HASH_BYTES

_LOOKED_AT = 64
"""Blocks of each group."""


@dataclass(frozen=True, kw_only=True)
class PrefixBlocks:
    """Of a prefix what a load needs, or what of it was not there. Groups without blocks are left out."""

    space: TierSpace
    tokens: int
    """Of the prefix."""
    parts: tuple[tuple[int, bytes], ...]
    """Group, and the names of its blocks."""

    @property
    def size_bytes(self) -> int:
        return sum(len(hashes) // HASH_BYTES * self.space.block_bytes(group) for group, hashes in self.parts)

    @property
    def count(self) -> int:
        return sum(len(hashes) // HASH_BYTES for _, hashes in self.parts)

    def is_there(self, cache: LocalCache) -> bool:
        """Whether memory has all of them."""
        return all(cache.lookup(self.space.number, group, hashes).all() for group, hashes in self.parts)

    def count_used(self, cache: LocalCache, *, since: int) -> int:
        """How many tokens of it were loaded since the cache's `use_clock` said so: of the group of which most were."""
        rules = self.space.rules
        return max(
            (
                int(cache.find_used(self.space.number, group, hashes, since=since).sum()) * rules[group].block_size
                for group, hashes in self.parts
            ),
            default=0,
        )

    def was_used(self, cache: LocalCache, *, since: int) -> bool:
        """Whether any of it was loaded since, as far as its first blocks say: whoever loads a prefix begins there."""
        return any(
            cache.find_used(self.space.number, group, hashes[: _LOOKED_AT * HASH_BYTES], since=since).any()
            for group, hashes in self.parts
        )


@dataclass(eq=False)
class Prefix:
    """A prompt's blocks by group, up to the tokens that are meant, and which of them memory has."""

    space: TierSpace
    chain: bytes
    limit: int

    def __post_init__(self) -> None:
        self.limit = min(self.limit, len(self.chain) // HASH_BYTES * self.space.geometry.hash_block_size)
        self.rows = [self.space.chain_rows(group, self.chain, self.limit) for group in range(len(self.space.rules))]

    def look_up(self, cache: LocalCache) -> Found:
        """Which blocks memory has, by group."""
        return [cache.lookup(self.space.number, group, rows.tobytes()) for group, rows in enumerate(self.rows)]

    def find_reach(self, there: Sequence[npt.NDArray[np.bool_]], *, limit: int | None = None) -> int:
        """The boundary up to which a load would come with what is there; 0: there is none."""
        return find_reach(self.space.rules, there, local=0, limit=self.limit if limit is None else limit)

    @property
    def most(self) -> int:
        """The boundary that it would have if all were there."""
        return self.find_reach([np.ones(len(rows), np.bool_) for rows in self.rows])

    def cut(self, boundary: int, lacking: Sequence[npt.NDArray[np.bool_]] | None = None) -> PrefixBlocks:
        """What a load up to a boundary needs; of that, what is lacking."""
        parts = []
        for group, rule in enumerate(self.space.rules):
            needed = needed_blocks(rule, local=0, boundary=boundary)
            rows = self.rows[group][needed.start : needed.stop]
            if lacking is not None:
                rows = rows[lacking[group][needed.start : needed.stop]]
            if len(rows):
                parts.append((group, rows.tobytes()))
        return PrefixBlocks(space=self.space, tokens=boundary, parts=tuple(parts))

    def name(self, boundary: int) -> bytes:
        """The name of the prefix that ends at a boundary: that of its last hash."""
        end = boundary // self.space.geometry.hash_block_size * HASH_BYTES
        return self.chain[end - HASH_BYTES : end]
