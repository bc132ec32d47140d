"""How much of a shared limit one user, or the users of one domain, may have."""

from __future__ import annotations

PARTS, DOMAIN_PARTS = 3, 7


def has_share(count: int, *, total: int, limit: int, parts: int = PARTS) -> bool:
    """Whether a user with `count` may have one more, where all have `total`: at most `parts` times what others could
    still get.

    With three parts, a single user gets three quarters of the limit, the next one three quarters of what is left, and
    so on, so that no user can take everything.
    """
    return total < limit and count < parts * (limit - total)


def has_shares(of_user: int, of_domain: int, *, total: int, limit: int) -> bool:
    """Whether a user and its domain may have one more: a user gets three quarters, and a domain seven eighths."""
    return has_share(of_user, total=total, limit=limit) and has_share(
        of_domain, total=total, limit=limit, parts=DOMAIN_PARTS
    )
