"""How many descriptors this process may have, and whether that leaves some for what it cannot do without."""

from __future__ import annotations

import contextlib
import resource

RESERVE = 512
"""Kept for memory that grows and descriptors that come with packets; an eighth, where there may be few."""


def raise_limit() -> None:
    """As far as this user may: others' connections count, and 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_of_reserve(file: int) -> bool:
    """Whether a new descriptor is one of the last: the kernel gives the lowest number that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and file >= limit - min(RESERVE, limit // 8)
