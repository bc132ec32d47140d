"""The parts of a promotion: a request that asks, one that waits, and the pieces that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LeaseId, Reservation
from kvoffload.hash_rows import Rows
from kvoffload.protocol import Promote, Promoted
from kvoffload.server.tiering.seen import Seen
from kvoffload.server.tiering.settings import TierSpace

Answer = Callable[[Promoted], None]


@dataclass(frozen=True, eq=False)
class AskedFor:
    """A request's blocks by group, asked for until `end_s`."""

    message: Promote
    space: TierSpace
    rows: list[Rows]
    end_s: float
    seen: Seen
    owner: str = ""
    """Name of the user or client who asks."""


@dataclass(eq=False)
class Keep:
    """How long blocks that came up for a request are kept from eviction: counted from the end of the last of its
    parts."""

    parts: int
    end_s: float
    """Time at which its last part ended; before that, the time at which the request ends at the latest."""

    def end_part(self, now_s: float) -> None:
        self.parts -= 1
        if not self.parts:
            self.end_s = now_s


@dataclass(frozen=True, eq=False)
class PartOf:
    """The blocks that one tier brings up for a request whose hit will reach `boundary`; by group, as places in its
    rows."""

    boundary: int
    keep: Keep
    missing: Sequence[npt.NDArray[np.int64]]
    kept: Sequence[npt.NDArray[np.int64]]
    """Blocks that are in memory already."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Blocks of one group that another server wants, by their names alone, until `deadline_s`. `answer` is called
    once."""

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
    """Returns the reservation, or None if it is not made yet."""


@dataclass(frozen=True, eq=False)
class Storing:
    """The complete blocks of a piece, until they can be read."""

    piece: Piece
    hashes: Rows
    parents: Rows
    takes: Sequence[Callable[[], npt.NDArray[np.uint8] | None]]
    """For each shard, returns the outcomes of its commit, or None if it is not made yet."""


@dataclass(eq=False)
class Piece:
    """Blocks of one group that are read together, for all requests that need them."""

    space: TierSpace
    group: int
    hashes: Rows
    before: Rows
    """The block before each, used if the tier does not know it."""
    names: list[bytes]
    first_token: int
    waiters: set[Promotion] = field(default_factory=set)
    read: Rows | None = None
    """Blocks that were not in memory when it was begun, or None if it has not been."""
    tickets: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Reservation tickets of their slots."""
    is_good: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    digests: dict[int, npt.NDArray[np.uint64]] = field(default_factory=dict)
    """Digests of the blocks' records, by shard."""
    parents: bytes = b""
    waits_for: int = 0
    """Number of batches that have not ended: one for each shard."""
    room: Room | None = None
    """Its slots while they are being reserved, otherwise None."""

    def __post_init__(self) -> None:
        self.size_bytes = len(self.hashes) * self.space.block_bytes(self.group)


@dataclass(eq=False)
class Promotion:
    """A request that waits."""

    answer: Answer
    boundary: int
    deadline_s: float
    keep: Keep
    begun_s: float
    pieces: set[Piece] = field(default_factory=set)
    leases: list[LeaseId] = field(default_factory=list)
    is_partly: bool = False
    is_peers: bool = False
    """Whether another server waits, not an engine."""
