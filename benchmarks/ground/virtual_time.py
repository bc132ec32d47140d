"""Virtual seconds: of the scheduler's thread, of a rank's worker and its stream of forwards."""

from __future__ import annotations


class Clock:
    """A thread's. It goes on by what is put upon it and never back."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def reach(self, time_s: float) -> None:
        """Waits for it, if it has not come yet."""
        self.now_s = max(self.now_s, time_s)


class Stream:
    """Runs what it is given, one after the other."""

    def __init__(self) -> None:
        self.free_s = 0.0
        """When what it has will have ended."""

    def run(self, seconds: float, *, not_before_s: float) -> float:
        """When it will have ended."""
        self.free_s = max(self.free_s, not_before_s) + seconds
        return self.free_s
