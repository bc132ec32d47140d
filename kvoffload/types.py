"""Values that more than one room speaks of."""

from __future__ import annotations

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
