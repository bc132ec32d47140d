"""Values that more than one room speaks of."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that name one full block of tokens and everything before it."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes that name one identity: two engines share cached blocks only if theirs are equal."""

GroupIndex = NewType("GroupIndex", int)
"""Position of a group in its geometry."""

BlockId = NewType("BlockId", int)
"""Position of a block in the engine's own cache."""

HASH_BYTES = 32


class ReuseRule(IntEnum):
    """The blocks of a group that must be present before a prefix may be reused."""

    # Messages, files and the native core have these numbers.
    PREFIX = 0
    """Every block from the first on."""
    WINDOW = 1
    """The blocks that hold the last `window` tokens before the boundary."""
    CHUNK = 2
    """The blocks of the chunk that the boundary lies in."""
    EXACT_BOUNDARY = 3
    """The block whose state was saved exactly at the boundary."""
    NOTHING = 4
    """Nothing: no layer of the group is stored."""

    @property
    def label(self) -> str:
        """The rule's name in reports and identities."""
        return self.name.lower()

    @property
    def has_window(self) -> bool:
        """Whether a boundary needs the group's last blocks only, and the group says how many tokens that are."""
        return self in (ReuseRule.WINDOW, ReuseRule.CHUNK)

    @property
    def is_chunked(self) -> bool:
        """Whether windows begin at multiples of their length, which is then the same for all layers of a group."""
        return self is ReuseRule.CHUNK


class AcquireOutcome(IntEnum):
    """Whether there is a lease, and if not, why."""

    # Messages and the native core have these numbers.
    HIT = 0
    MISS = 1
    OVER_LIMIT = 2
    """The session is not open, or it, its user or a tenant would hold more than they may."""
    NO_ROOM = 3
    """The index cannot hold another lease."""
