"""A question for blocks, the same value from an engine to the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import Buffer

NO_LIMIT = 2**64 - 1


class Ask(NamedTuple):
    """The longest prefix of a chain, in (local, limit], that all groups accept. Tokens everywhere."""

    chain: Buffer
    """The request's hashes, from its first token on."""
    local: int = 0
    """Number of tokens that the engine has itself."""
    limit: int = NO_LIMIT
    alignment: int = 1
    """Boundaries are multiples of it."""
    shards: Sequence[int] = ()
    """The shards whose digests are wanted with the lease."""
