"""Threads that receive and close descriptors of other processes, because that may take as long as the sender likes.

A socket that lingers, or a file of a file system that hangs, holds up the thread that lets go of it last. That is the
thread that closes it, receives a packet without room for it, or closes a socket in which it lies unread.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffload.errors import ConfigError
from kvoffload.packets import close_all

MAX_THREADS = 8
"""Number of threads. A user keeps at most one of them, so that this many users have to work together to keep all."""
TOLD_AT_ONCE = 8
"""Number of jobs whose results are told in one turn of the loop: each may be a greeting."""
NOBODY = 2**32 - 1
"""The user of a connection of which the kernel does not tell the user."""

REFUSED = "refused"
"""The kind of an end that was never let in: it takes none of the places of those that are."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    act: Callable[[], object]
    counted: str
    """The kind under which its descriptors count until it is done."""
    count: int
    """Number of descriptors that are open until it is done."""
    then: Callable[[object], None] | None


class ForeignFiles:
    """Does each user's jobs in their order. Belongs to the thread of the event loop, which calls `finish` when `fileno`
    is readable."""

    def __init__(self) -> None:
        """Starts the first thread; the others start when they are needed. ConfigError: it cannot be started."""
        self._changed = threading.Condition()
        self._jobs: dict[int, deque[_Job]] = {}
        """Jobs that no thread does yet, by user."""
        self._busy: set[int] = set()
        """Users for whom a thread does a job."""
        self._counts: Counter[tuple[int, str]] = Counter()
        """Descriptors that are still to be closed, by user and by what they count as."""
        self._done: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._is_closed = False
        self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if not self._start_thread():
            os.close(self._more)
            remedy = "raise the limit of threads (ulimit -u, pids.max of the cgroup, TasksMax of a systemd unit)"
            raise ConfigError("a thread of the server cannot be started", remedy=remedy)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `finish` has something to do."""
        return self._more

    def total(self, kind: str) -> int:
        """Returns how many ends of channels of this kind, and descriptors of packets, are still to be closed."""
        with self._changed:
            return sum(count for (_, counted), count in self._counts.items() if counted in (kind, ""))

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have been done."""
        with self._changed:
            return not self._jobs and not self._busy

    def count(self, uid: int, kind: str) -> int:
        """Returns how many of them are of this user."""
        return self._counts[uid, kind] + self._counts[uid, ""]

    def close_end(self, uid: int, kind: str, close: Callable[[], object]) -> None:
        """Calls `close` of an end of this kind of channel. Until then it counts as one of these, so that ends of
        another kind leave no other user without room."""
        self.do(uid, close, count=1, kind=kind)

    def close_files(self, uid: int, files: Sequence[int]) -> None:
        """Closes descriptors that processes of this user have sent."""
        if files:
            self.do(uid, partial(close_all, list(files)), count=len(files))

    def do(
        self,
        uid: int,
        act: Callable[[], object],
        *,
        count: int = 0,
        kind: str = "",
        then: Callable[[object], None] | None = None,
    ) -> None:
        """Does a job for this user on a thread, during which `count` descriptors stay open, which count as ends of this
        kind of channel, or of every kind. `finish` calls `then` with
        its result: None, if the job raises an OSError."""
        with self._changed:
            self._counts[uid, kind] += count
            self._jobs.setdefault(uid, deque()).append(_Job(act=act, counted=kind, count=count, then=then))
            self._changed.notify()
        self.start_threads()

    def start_threads(self) -> None:
        """Starts threads if users wait for one. To be called now and then, as starting one may fail."""
        with self._changed:
            wanted = min(len(self._jobs.keys() - self._busy) - self._idle, MAX_THREADS - self._threads)
        for _ in range(wanted):
            if not self._start_thread():
                break

    def finish(self) -> None:
        """Calls `then` of jobs that have been done, of `TOLD_AT_ONCE` at most. If more have been, the descriptor stays
        readable."""
        os.eventfd_read(self._more)
        for _ in range(min(len(self._done), TOLD_AT_ONCE)):
            self._done.popleft()()
        if self._done and not self._is_closed:
            os.eventfd_write(self._more, 1)

    def close(self) -> None:
        """Lets the threads end when they have done what is left. Waits for none of them."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            os.close(self._more)
        while self._done:
            self._done.popleft()()

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name="kvoffload-files", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            uid, job = taken
            try:
                result = job.act()
            except OSError:
                result = None
            with self._changed:
                self._busy.discard(uid)
                counted = uid, job.counted
                self._counts[counted] -= job.count
                if not self._counts[counted]:
                    del self._counts[counted]
                if job.then is not None:
                    self._done.append(partial(job.then, result))
                    if not self._is_closed:
                        os.eventfd_write(self._more, 1)

    def _take(self) -> tuple[int, _Job] | None:
        """Waits for a job of a user for whom no thread works. None: there is none, and there will be none."""
        with self._changed:
            while (uid := next((uid for uid in self._jobs if uid not in self._busy), None)) is None:
                if self._is_closed:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            jobs = self._jobs[uid]
            job = jobs.popleft()
            if not jobs:
                del self._jobs[uid]
            self._busy.add(uid)
            return uid, job
