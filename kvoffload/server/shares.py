"""How much of what is for all one of them may have."""

from __future__ import annotations

PARTS, DOMAIN_PARTS = 3, 7


def has_share(count: int, *, total: int, limit: int, parts: int = PARTS) -> bool:
    """Whether somebody who has `count` may have one more: at most so many times what would be left for others.

    With three parts one alone gets three quarters of the limit, the next one three quarters of what is left, and nobody
    takes the rest.
    """
    return total < limit and count < parts * (limit - total)


def has_shares(of_user: int, of_domain: int, *, total: int, limit: int) -> bool:
    """Says the same of a user and its domain: one user gets three quarters, all users of one domain seven eighths."""
    return has_share(of_user, total=total, limit=limit) and has_share(
        of_domain, total=total, limit=limit, parts=DOMAIN_PARTS
    )
