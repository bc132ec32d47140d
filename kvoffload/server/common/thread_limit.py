"""How many threads this process may have, and how many of them it keeps for itself."""

from __future__ import annotations

import resource
from pathlib import Path

from kvoffload.cgroups import read_limits

RESERVE = 512
"""Threads kept for what is not a user's: memory, disks, stores, peers, and other processes under the same limit. It is
half of the limit where that is less."""
UNBOUNDED = 1 << 30


def count_allowed(root: Path = Path("/")) -> int:
    """Returns how many threads the limits of this process's user and of its cgroups allow, or `UNBOUNDED` if there are
    no such limits. `root` is where `proc` and `sys` are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = UNBOUNDED if soft == resource.RLIM_INFINITY else soft
    for words in read_limits("pids", unified="pids.max", divided=("pids.max",), root=root):
        # "max" is no limit.
        if len(words) == 1 and words[0].isdecimal():
            allowed = min(allowed, int(words[0]))
    return allowed


def count_spare(root: Path = Path("/")) -> int:
    """Returns how many threads may be started for users, at least 1."""
    return leave_reserve(count_allowed(root))


def leave_reserve(allowed: int) -> int:
    """Returns how many of the allowed threads may be started for users, at least 1."""
    return max(allowed - min(RESERVE, allowed // 2), 1)
