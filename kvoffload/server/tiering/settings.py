"""The settings of a slower tier: what it is used for, and how much of everything it may take."""

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
from kvoffload.native import SealKeys
from kvoffload.tiers import RecordNames, Tier
from kvoffload.types import HASH_BYTES
from kvoffload.units import MIB


class WriteRule(Enum):
    """When blocks are written to a slower tier."""

    THROUGH = "write_through"
    """Blocks are written as soon as they are stored."""
    BACK = "write_back"
    """Blocks are written when memory will need their room before long, or the server ends."""
    SECOND_USE = "second_use"
    """The same as BACK, but only for blocks that were loaded since they were stored."""


OnLearn = Callable[[int, bytes, CacheGeometry], None]
"""Called with a namespace's number, fingerprint and geometry."""
OnForget = Callable[[bytes], bool]
"""Called with an identity's fingerprint when it may be forgotten. Returns False to keep it."""
Wants = Callable[[bytes], npt.NDArray[np.bool_]]
"""Returns which of these hashes' blocks to write."""

FindWanted = Callable[[], Wants | None]
"""Returns what chooses the blocks that should be written to the tier now, or None if there are none."""

PIECE_BLOCKS = 1024
"""Largest number of blocks in a piece, however small they are, because a piece is handled in one go."""


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The settings of one tier of one domain."""

    name: str = "disk"
    """Name of the tier in metrics and log lines."""
    write: WriteRule = WriteRule.THROUGH
    queue_s: float = 2.0
    """Seconds. Writes that would wait longer are dropped, unless all that waits is one piece."""
    queue_share: float = 0.5
    """Share of memory that waiting writes may take. Those beyond it are dropped: memory would lose them before their
    turn."""
    piece_bytes: int = 8 * MIB
    """Bytes of one piece, which is moved at once."""
    under_way_bytes: int = 64 * MIB
    """Bytes under way in each direction. While they are, what is written is leased, and what is read has its slots."""
    put_timeout_s: float = 30.0
    look_timeout_s: float = 1.0
    """How long the tier may take to say which of some records it has. Records of which it does not say are missing."""
    hold_s: float = 0.5
    """Seconds for which blocks that were brought up are held for the request that asked for them."""
    held_share: float = 0.5
    """Share of memory that may be held for requests that wait, or have not yet come for what they waited for."""
    promotion_limit: int = 256
    """Number of engines' requests at a time, and as many of peers. Those beyond it get what is in memory."""
    kept_share: float = 0.75
    """Share of memory that may be filled with blocks that wait to be written back."""
    seal_keys: SealKeys | None = None
    """Keys that seal the records of a remote tier; None: they are not sealed. The disk has its keys itself."""
    wants: Wants | None = None
    """Chooses the blocks that are written; None: all are."""
    on_leave: FindWanted = lambda: None
    """Called when the server ends and its memory goes with it. Chooses the blocks that no other server has."""
    find_moved: FindWanted = lambda: None
    """Called periodically. Chooses the blocks that have another place in the tier since the last call."""
    on_learn: OnLearn = lambda *_: None
    """Called with identities whose blocks may be moved."""
    on_forget: OnForget = lambda _: True
    """Called with identities that no session registers and that have no blocks in memory any more."""


class TierPlace(Protocol):
    """Where a tier is, and what may be done there: the settings of one kind of tier."""

    def describe(self) -> str:
        """Describes the place in a few words, without secrets."""
        ...

    def open_tier(self) -> Tier:
        """Opens the tier, and starts its threads. TierError: it cannot be opened with these settings."""
        ...


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """A slower tier of a domain: where it is, and what it is used for."""

    place: TierPlace
    settings: TierSettings


@dataclass(eq=False)
class TierCounts:
    """Counts of what has happened in a tier since the server opened it: in blocks, unless the name says something
    else."""

    written: int = 0
    written_bytes: int = 0
    dropped_full: int = 0
    """Blocks not written because the queue was too long."""
    dropped_gone: int = 0
    """Blocks not written because memory had lost them before their turn came."""
    failed: int = 0
    """Blocks that the tier failed to write."""
    promoted: int = 0
    promoted_bytes: int = 0
    missing: int = 0
    """Records that were asked for and were no longer there."""
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
    """A namespace whose blocks may be moved."""

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
        """Returns which blocks the tier has all shards of."""
        found = np.ones(len(hashes) // HASH_BYTES, np.bool_)
        for shard in range(self.shards(group)):
            found &= tier.contains(self.names(group, hashes, shard))
        return found

    def chain_rows(self, group: int, chain: bytes, limit: int) -> Rows:
        """Returns the names of a request's blocks up to `limit` tokens."""
        rows = as_rows(chain)
        every = self.geometry.groups[group].rule.block_size // self.geometry.hash_block_size
        count = min(len(rows), limit // self.geometry.hash_block_size) // every
        return rows[every - 1 : count * every : every]

    def chain_rows_of(self, chain: bytes, limit: int) -> list[Rows]:
        """Returns the same for all groups."""
        return [self.chain_rows(group, chain, limit) for group in range(len(self.rules))]

    def rows_before(self, group: int, rows: list[Rows]) -> Rows:
        """Returns the block before each of a group's `chain_rows`, as `LocalCache.commit` takes it; zeros for none."""
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
    """Cuts `count` blocks into parts of at most `piece_bytes`, each of at least one and at most PIECE_BLOCKS blocks."""
    step = min(max(piece_bytes // max(block_bytes, 1), 1), PIECE_BLOCKS)
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


FindSpace = Callable[[int], TierSpace | None]
FindNear = Callable[[RecordNames], npt.NDArray[np.bool_]]
"""Returns which of these records a tier has, as far as it knows. From any thread."""
