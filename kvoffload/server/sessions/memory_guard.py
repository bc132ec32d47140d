"""Makes pools give memory back while it is short, and lets them grow again later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvoffload.server.sessions.memory_watch import MemoryWatch
from kvoffload.server.sessions.pool_growth import PoolGrowth

logger = logging.getLogger(__name__)

CALM_S = 30.0
"""Seconds without a shortage after which pools may grow again."""


class MemoryGuard:
    """Looks at the memory on a thread of its own: giving it back may take longer than a turn of the server's loop."""

    def __init__(
        self,
        watch: MemoryWatch,
        pools: Callable[[], Sequence[PoolGrowth]],
        clock: Callable[[], float],
        *,
        calm_s: float = CALM_S,
    ) -> None:
        self._watch = watch
        self._pools = pools
        self._clock = clock
        self._calm_s = calm_s
        self._short_s = 0.0
        """When memory was last short."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Starts the thread, unless it is there or was stopped. If it cannot be started, the next call tries again."""
        if self._thread is not None or self._stopped.is_set():
            return
        thread = threading.Thread(target=self._run, name="kvoffload-memory-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as fault:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("no memory is given back for now: %s", fault)
            return
        self._thread = thread

    def close(self) -> None:
        """Stops, and waits until the thread has ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def turn(self) -> float:
        """Looks once, and does what is needed. Returns the seconds until the next look."""
        pools = self._pools()
        pool_bytes = sum(pool.ready_bytes for pool in pools)
        found = self._watch.look(pool_bytes)
        now_s = self._clock()
        if found.reason:
            self._short_s = now_s
        is_calm = now_s - self._short_s >= self._calm_s
        for pool in pools:
            if found.reason or not is_calm:
                share_bytes = found.missing_bytes * pool.ready_bytes // max(pool_bytes, 1)
                pool.shrink(share_bytes, found.reason, found.limited_by)
            elif pool.is_shrinking and found.free_bytes > found.spare_bytes + pool.segment_bytes:
                pool.resume(found.spare_bytes)
        return found.wait_s

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.turn()):
                pass
        except Exception:
            logger.exception("no memory is given back any more")
