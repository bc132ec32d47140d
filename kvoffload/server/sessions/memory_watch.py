"""Watches the memory of the machine and of our cgroups, and says when a pool should give some of it back. Decides
only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoffload.cgroups import read_limits, read_text
from kvoffload.native import read_memory_headroom

LOW_SHARE = 64
"""Memory is short when less than one part in so many of all memory is free."""
SPARE_SHARE = 16
"""The pool gives back until one part in so many is free, and leaves as much when it grows again."""
AHEAD_S = 0.5
"""Memory counts as short this many seconds before it would be, at the speed at which other processes take it."""
STALL_SHARE = 0.1
"""Tasks that wait for memory for this share of a second show that it is short, too."""
STALL_WINDOW_S = 1.0
NEAR_SHARE = 4
"""While less than one part in so many is free, the watch looks often."""
NEAR_WAIT_S = 0.1
FAR_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of a look at the memory."""

    free_bytes: int
    """How much this process could take."""
    spare_bytes: int
    """How much should be free before the pool grows again."""
    limited_by: str = ""
    """The bound that leaves so little, in words."""
    reason: str = ""
    """Why memory is short: `cgroup`, `machine` or `stalls`, as metrics name it; empty: it is not short."""
    missing_bytes: int = 0
    """How much to give back."""
    wait_s: float = FAR_WAIT_S
    """Seconds until the next look."""


@dataclass
class _Stalls:
    """Time for which tasks have waited for memory, and how often a cgroup's limit was reached."""

    since_s: float
    waited_us: int
    limits: int


class MemoryWatch:
    """Reads some ten small files at each look. For one thread."""

    def __init__(self, clock: Callable[[], float], *, root: Path = Path("/")) -> None:
        """Watches the files below `root`, where `proc` and `sys` are. `clock` gives seconds."""
        self._clock = clock
        self._root = root
        self._last: tuple[float, int] | None = None
        """Time of the last look, and what was free then with the pool's own memory."""
        self._stalls: _Stalls | None = None
        self._is_stalled = False

    def look(self, pool_bytes: int) -> Reading:
        """Reads how much memory is free, for pools that have `pool_bytes` of it now."""
        now_s = self._clock()
        free_bytes, limited_by, total_bytes = read_memory_headroom(str(self._root / "proc"))
        if not limited_by:
            return Reading(free_bytes=free_bytes, spare_bytes=0)
        low_bytes, spare_bytes = total_bytes // LOW_SHARE, total_bytes // SPARE_SHARE
        expected_bytes = free_bytes - self._foresee(now_s, free_bytes + pool_bytes)
        is_stalled = self._look_for_stalls(now_s) and free_bytes < spare_bytes
        reason = ""
        if expected_bytes < low_bytes:
            reason = "cgroup" if "cgroup" in limited_by else "machine"
        elif is_stalled:
            reason = "stalls"
        return Reading(
            free_bytes=free_bytes,
            spare_bytes=spare_bytes,
            limited_by=limited_by,
            reason=reason,
            missing_bytes=max(spare_bytes - expected_bytes, 1) if reason else 0,
            wait_s=NEAR_WAIT_S if reason or free_bytes < total_bytes // NEAR_SHARE else FAR_WAIT_S,
        )

    def _foresee(self, now_s: float, unused_bytes: int) -> int:
        """Returns how much other processes will take in `AHEAD_S`, if they go on as since the last look."""
        last, self._last = self._last, (now_s, unused_bytes)
        if last is None or now_s <= last[0]:
            return 0
        return int(max(last[1] - unused_bytes, 0) * min(AHEAD_S / (now_s - last[0]), AHEAD_S / NEAR_WAIT_S))

    def _look_for_stalls(self, now_s: float) -> bool:
        """Returns whether tasks waited for memory for a tenth of the last second or more, or a limit was reached."""
        last = self._stalls
        if last is None or now_s - last.since_s >= STALL_WINDOW_S:
            found = self._stalls = _Stalls(now_s, self._read_waited_us(), self._count_limits())
            if last is not None:
                share = (found.waited_us - last.waited_us) / 1e6 / (now_s - last.since_s)
                self._is_stalled = share >= STALL_SHARE or found.limits > last.limits
        return self._is_stalled

    def _read_waited_us(self) -> int:
        """Returns the greater of the times in which tasks of the machine, and those of our cgroups, waited."""
        texts = [read_text(self._root / "proc/pressure/memory").split()]
        texts += read_limits("memory", unified="memory.pressure", divided=(), root=self._root)
        return max((_find_number(words, "total=") for words in texts), default=0)

    def _count_limits(self) -> int:
        """Returns how often processes of our cgroups had to wait at a limit, or were killed there."""
        words = read_limits("memory", unified="memory.events", divided=(), root=self._root)
        return sum(_count_events(one) for one in words)


def _count_events(words: list[str]) -> int:
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    return sum(int(pairs[name]) for name in ("high", "max", "oom") if pairs.get(name, "").isdigit())


def _find_number(words: list[str], prefix: str) -> int:
    """Returns the first number behind the prefix: of memory.pressure the time in which some task waited."""
    numbers = (word.removeprefix(prefix) for word in words if word.startswith(prefix))
    return next((int(one) for one in numbers if one.isdigit()), 0)
