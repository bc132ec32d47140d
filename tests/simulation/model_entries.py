"""Contents of the simulated memory: entries, each with one slot, and the sessions that have them."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import Buffer

from kvoffload.types import HASH_BYTES

SLOT_BYTES = 64
PIECES = 2
"""Number of pieces in which a copy moves one shard of a record."""
Tag = tuple[bytes, bytes, int]
"""The contents that a piece must have: the identity, the block's name, the shard."""


@dataclass(eq=False)
class Entry:
    """One slot, and the sessions that have it."""

    place: int
    generation: int = 1
    state: str = "free"
    """free, reserved, readable, or quarantined: without a name, and leased."""
    key: tuple[int, int, bytes] | None = None
    space: tuple[int, int] = (0, 0)
    session: int = 0
    committed: int = 0
    leases: int = 0
    touched: int = 0

    @property
    def ticket(self) -> int:
        return self.generation << 16 | self.place + 1


@dataclass(eq=False)
class Session:
    """An engine, as the memory knows it."""

    members: set[int] = field(default_factory=set)
    is_open: bool = True
    is_ending: bool = False


def split(hashes: Buffer) -> list[bytes]:
    data = bytes(hashes)
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
