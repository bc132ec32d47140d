"""What a tier below memory is used for, and how much of everything it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, GroupRule
from kvoffload.hash_rows import Rows, as_rows
from kvoffload.kvspec import ReuseRule
from kvoffload.tiers import RecordNames, Tier
from kvoffload.types import HASH_BYTES
from kvoffload.units import MIB


class WriteRule(Enum):
    """When blocks are written down."""

    THROUGH = "write_through"
    """As soon as they are stored."""
    BACK = "write_back"
    """When memory will need their room before long, or the server ends."""
    SECOND_USE = "second_use"
    """Likewise, and only those that were loaded since they were stored."""


OnLearn = Callable[[int, bytes, CacheGeometry], None]
"""Of a namespace: its number, fingerprint and geometry."""
OnForget = Callable[[bytes], bool]
"""Hears of an identity, by its fingerprint, and answers False if it is to stay."""
Wants = Callable[[bytes], npt.NDArray[np.bool_]]
"""Of hashes: which."""

PIECE_BLOCKS = 1024
"""However small they are: what is done for one piece is done in one go."""


@dataclass(frozen=True, kw_only=True)
class TierTerms:
    """What one tier of one domain goes by."""

    name: str = "disk"
    """As metrics and log lines say it."""
    write: WriteRule = WriteRule.THROUGH
    queue_s: float = 2.0
    """Writes that would wait longer are dropped, unless all that waits is one piece."""
    queue_share: float = 0.5
    """Likewise those beyond so much of memory: it would lose them before their turn."""
    piece_bytes: int = 8 * MIB
    """Moved at once."""
    under_way_bytes: int = 64 * MIB
    """In each direction; what is written is leased for so long, what is read has its slots."""
    put_timeout_s: float = 30.0
    hold_s: float = 0.5
    """How long what was brought up is held for whoever asked for it."""
    held_share: float = 0.5
    """Of memory, that may be held for requests which wait, or have not come yet for what they waited for."""
    promotion_limit: int = 256
    """Requests of engines at a time, and as many of peers; whoever comes later has what is in memory."""
    kept_share: float = 0.75
    """Of memory, that may be filled with blocks that are to be written back."""
    wants: Wants | None = None
    """Which blocks are written; None: all."""
    on_learn: OnLearn = lambda *_: None
    """Hears of identities whose blocks are moved."""
    on_forget: OnForget = lambda _: True
    """Hears of those of which nobody has blocks any more."""


class TierPlace(Protocol):
    """Where a tier is, and what may be done there: the terms of one of its kinds."""

    def describe(self) -> str:
        """Describes the place in a few words, without secrets."""
        ...

    def open_tier(self) -> Tier:
        """Opens the tier, and starts its threads. TierError: the terms cannot be kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """A tier below a domain's memory: where, and what for."""

    place: TierPlace
    terms: TierTerms


@dataclass(eq=False)
class TierCounts:
    """What happened since the server has it: in blocks, unless the name says something else."""

    written: int = 0
    written_bytes: int = 0
    dropped_full: int = 0
    """The queue was too long."""
    dropped_gone: int = 0
    """Memory had lost them before their turn came."""
    failed: int = 0
    """Writes that the tier did not take."""
    promoted: int = 0
    promoted_bytes: int = 0
    missing: int = 0
    """Asked for, and not there any more."""
    quarantined: int = 0
    """Records whose bytes were not what they should be."""
    late: int = 0
    """Requests whose time was over before all had come."""
    too_slow: int = 0
    """Requests for which computing was estimated to be faster."""
    without_room: int = 0
    """Requests that found no room in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TierSpace:
    """A namespace whose blocks are moved."""

    number: int
    fingerprint: bytes
    geometry: CacheGeometry

    @property
    def rules(self) -> list[GroupRule]:
        return [group.rule for group in self.geometry.groups]

    def record_bytes(self, group: int) -> int:
        """Returns the bytes of one shard of a block."""
        return self.geometry.groups[group].record_bytes

    def block_bytes(self, group: int) -> int:
        """Returns the bytes of a block with all shards."""
        return self.record_bytes(group) * self.shards(group)

    def shards(self, group: int) -> int:
        return self.geometry.groups[group].shards

    def names(self, group: int, hashes: bytes, shard: int = 0) -> RecordNames:
        return RecordNames(fingerprint=self.fingerprint, hashes=hashes, group=group, shard=shard)

    def find_whole(self, tier: Tier, group: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Says which blocks the tier has all shards of."""
        found = np.ones(len(hashes) // HASH_BYTES, np.bool_)
        for shard in range(self.shards(group)):
            found &= tier.contains(self.names(group, hashes, shard))
        return found

    def chain_rows(self, group: int, chain: bytes, limit: int) -> Rows:
        """The names of a request's blocks up to `limit` tokens."""
        rows = as_rows(chain)
        every = self.geometry.groups[group].rule.block_size // self.geometry.hash_block_size
        count = min(len(rows), limit // self.geometry.hash_block_size) // every
        return rows[every - 1 : count * every : every]

    def rows_before(self, group: int, rows: list[Rows]) -> Rows:
        """Of a group's `chain_rows`, the block before each, as `LocalCache.commit` calls it; zeros for none."""
        rules, before = self.rules, np.zeros_like(rows[group])
        if rules[group].reuse is ReuseRule.PREFIX:
            before[1:] = rows[group][:-1]
            return before
        anchor = next((at for at, rule in enumerate(rules) if rule.reuse is ReuseRule.PREFIX), None)
        if anchor is not None:
            every, rest = divmod(rules[group].block_size, rules[anchor].block_size)
            found = rows[anchor][every - 1 :: every] if every and not rest else rows[anchor][:0]
            count = min(len(before), len(found))
            before[:count] = found[:count]
        return before


"""Hashes, one a row."""


def as_names(rows: Rows) -> list[bytes]:
    """Returns names for dictionaries, many at once. Zeros at a name's end are left out: each is still its own."""
    return np.ascontiguousarray(rows).view(f"S{HASH_BYTES}").ravel().tolist()


def cut_pieces(count: int, block_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """Parts of `count` blocks of at most so many bytes, of at least one block each and PIECE_BLOCKS at most."""
    step = min(max(piece_bytes // max(block_bytes, 1), 1), PIECE_BLOCKS)
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


FindSpace = Callable[[int], TierSpace | None]
