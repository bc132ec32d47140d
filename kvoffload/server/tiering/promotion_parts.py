"""What a promotion is made of: a request that asks, one that waits, and the pieces that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LeaseId, Reservation
from kvoffload.hash_rows import Rows
from kvoffload.protocol import Promote, Promoted
from kvoffload.server.tiering.terms import TierSpace

Answer = Callable[[Promoted], None]


@dataclass(frozen=True, eq=False)
class AskedFor:
    """Is what a request asked for: its blocks by group, until `end_s`."""

    message: Promote
    space: TierSpace
    rows: list[Rows]
    end_s: float


@dataclass(eq=False)
class Keep:
    """How long what comes up for a request is kept from being evicted: from the end of the last of its parts."""

    parts: int
    end_s: float
    """Until they have all ended, when the request does at the latest."""

    def end_part(self, now_s: float) -> None:
        self.parts -= 1
        if not self.parts:
            self.end_s = now_s


@dataclass(frozen=True, eq=False)
class PartOf:
    """What one tier brings up for a request whose hit will reach `boundary`; all by group, as places in its rows."""

    boundary: int
    keep: Keep
    missing: Sequence[npt.NDArray[np.int64]]
    kept: Sequence[npt.NDArray[np.int64]]
    """In memory already."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Blocks of one group, by their names alone, until `deadline_s`. `answer` is called once."""

    name_space: int
    group: int
    hashes: bytes
    deadline_s: float
    answer: Answer


@dataclass(frozen=True, eq=False)
class Room:
    """Slots that are being reserved for a piece."""

    hashes: Rows
    before: Rows
    take: Callable[[], Reservation | None]
    """None: not yet."""


@dataclass(frozen=True, eq=False)
class Storing:
    """What is whole of a piece, until it can be read."""

    piece: Piece
    hashes: Rows
    parents: Rows
    takes: Sequence[Callable[[], npt.NDArray[np.uint8] | None]]
    """Of each shard; None: not yet."""


@dataclass(eq=False)
class Piece:
    """Blocks of one group that are read together, for whoever needs them."""

    space: TierSpace
    group: int
    hashes: Rows
    before: Rows
    """What came before each, for tiers that do not know it."""
    names: list[bytes]
    first_token: int
    waiters: set[Promotion] = field(default_factory=set)
    read: Rows | None = None
    """Those that were not in memory when it was begun; None: it was not."""
    tickets: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Of their slots."""
    is_good: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    digests: dict[int, npt.NDArray[np.uint64]] = field(default_factory=dict)
    """By shard."""
    parents: bytes = b""
    waits_for: int = 0
    """Batches: one a shard."""
    room: Room | None = None
    """Its slots are being reserved."""

    def __post_init__(self) -> None:
        self.size_bytes = len(self.hashes) * self.space.block_bytes(self.group)


@dataclass(eq=False)
class Promotion:
    """One request that waits."""

    answer: Answer
    boundary: int
    deadline_s: float
    keep: Keep
    begun_s: float
    pieces: set[Piece] = field(default_factory=set)
    leases: list[LeaseId] = field(default_factory=list)
    is_partly: bool = False
    is_peers: bool = False
    """Another server waits, not an engine."""
