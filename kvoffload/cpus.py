"""How many processors this process may use at once: its affinity, and what its cgroups allow it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cpus(root: Path = Path("/")) -> int:
    """Returns how many processors this process may use, at least 1. What cannot be read bounds nothing. `root`: where
    `proc` and `sys` are."""
    allowed = float(len(os.sched_getaffinity(0)))
    for share in _cgroup_shares(root):
        allowed = min(allowed, share)
    return max(math.ceil(allowed), 1)


def _cgroup_shares(root: Path) -> Iterator[float]:
    """Processors' time per time, of each cgroup that bounds it: its own, and all above it."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_unified = number == "0" and not controllers
        if not is_unified and "cpu" not in controllers.split(","):
            continue
        top = mounts if is_unified else mounts / controllers
        group = PurePosixPath(path.strip("/"))
        for above in (group, *group.parents):
            folder = top / above
            if is_unified:
                words = _read(folder / "cpu.max").split()
            else:
                words = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
            # "max", or -1, is no bound.
            if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
                yield int(words[0]) / int(words[1])


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
