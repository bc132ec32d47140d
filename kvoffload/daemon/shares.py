"""How much of what is for all one of them may have."""

from __future__ import annotations

PARTS = 3


def has_share(count: int, *, total: int, limit: int) -> bool:
    """Whether somebody who has `count` may have one more: at most three times what would be left for others.

    One alone gets three quarters of the limit, the next one three quarters of what is left, and nobody takes the rest.
    """
    return total < limit and count < PARTS * (limit - total)
