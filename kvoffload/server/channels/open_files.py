"""The number of descriptors that this process may have, and whether enough are left for essential ones."""

from __future__ import annotations

import contextlib
import resource

RESERVE = 512
"""Descriptors kept for memory that grows and descriptors that arrive with packets; an eighth of the limit, if that is
less."""

KINDS = 4
"""Descriptors of one process: its lifeline, its control connection, its express channel, and the one that shows that it
lives."""

UNBOUNDED = 1 << 30


def raise_limit() -> None:
    """Raises the limit of open files as far as this user may: others' connections count, and 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def count_allowed() -> int:
    """Returns how many descriptors may be open. As many more may be in packets that processes have not read."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else UNBOUNDED


def is_of_reserve(file: int) -> bool:
    """Whether a new descriptor is one of the last: the kernel gives the lowest number that is free."""
    return file >= _count_spare()


def count_processes() -> int:
    """Returns for how many processes there are descriptors. If there are as many lifelines, and as many connections of
    each other kind, a user who has its share of each leaves descriptors for others."""
    return max(_count_spare() // KINDS, 1)


def _count_spare() -> int:
    limit = count_allowed()
    return limit - min(RESERVE, limit // 8)
