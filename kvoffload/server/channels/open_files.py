"""How many descriptors this process may have, and whether that leaves some for what it cannot do without."""

from __future__ import annotations

import contextlib
import resource

RESERVE = 512
"""Kept for memory that grows and descriptors that come with packets; an eighth, where there may be few."""

UNBOUNDED = 1 << 30


def raise_limit() -> None:
    """Raises the limit of open files as far as this user may: others' connections count, and 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def count_allowed() -> int:
    """So many may be open, and as many may be under way to others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else UNBOUNDED


def is_of_reserve(file: int) -> bool:
    """Whether a new descriptor is one of the last: the kernel gives the lowest number that is free."""
    limit = count_allowed()
    return file >= limit - min(RESERVE, limit // 8)
