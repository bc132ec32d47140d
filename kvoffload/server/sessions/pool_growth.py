"""Grows a pool to its full size while it serves."""

from __future__ import annotations

import logging
import threading

from kvoffload.cache import LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds until the next attempt after a shortage: other processes may have freed memory."""


class PoolGrowth:
    """Grows on a thread of its own; `stop` and `close` are for the owner. A shortage is no fault: the pool is smaller
    for as long as it lasts."""

    def __init__(self, cache: LocalCache, *, name: str = "", step_bytes: int = 0, retry_s: float = RETRY_S) -> None:
        """Grows a cache by `step_bytes` at a time. `name` is the domain's, as the log is to call it."""
        self._cache = cache
        self._label = f"the memory of domain {name!r}" if name else "the memory"
        self._step_bytes = step_bytes
        self._retry_s = retry_s
        self._former_bytes = 0
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Starts the thread if it has not been started and growing was not stopped. Without a thread the pool stays as
        it is, and the next call tries again."""
        if self._thread is not None or self._stopped.is_set():
            return
        thread = threading.Thread(target=self._run, name="kvoffload-growth", daemon=True)
        try:
            thread.start()
        except RuntimeError as fault:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s stays smaller for now, %s: %s", self._label, self._describe(), fault)
            return
        self._thread = thread

    def stop(self) -> None:
        """Takes no more memory, except for those parts of the present step that threads are working on."""
        self._stopped.set()
        self._changed.set()
        self._cache.stop_growing()

    def limit(self, former_bytes: int) -> None:
        """Notes how much of former servers' memory engines still have. Together with it the pool does not exceed its
        full size. From any thread."""
        if former_bytes != self._former_bytes:
            self._former_bytes = former_bytes
            self._changed.set()

    def close(self) -> None:
        """Stops, and waits until the thread has ended."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        capacity_bytes = self._cache.capacity_bytes
        if self._cache.ready_bytes == capacity_bytes:
            return
        told, is_short = self._tenths(), False
        logger.info("%s is served and grows: %s so far", self._label, self._describe())
        while not self._stopped.is_set():
            self._await_release()
            try:
                is_growing = self._cache.grow()
            except CacheMemoryError as fault:
                # Logged once: other processes' memory may come and go for hours.
                level = logging.DEBUG if is_short else logging.WARNING
                logger.log(level, "%s stays smaller for now, %s: %s", self._label, self._describe(), fault)
                is_short = True
                self._stopped.wait(self._retry_s)
                continue
            if not is_growing:
                break
            if self._tenths() > told:
                told = self._tenths()
                logger.debug("%s grows: %s", self._label, self._describe())
        if not self._stopped.is_set():
            logger.info("%s is all there: %s", self._label, describe_size(capacity_bytes))

    def _await_release(self) -> None:
        """Waits until the next step has room in addition to what engines have of former servers, or growing was
        stopped."""
        is_told = False
        while not self._stopped.is_set():
            self._changed.clear()
            former_bytes = self._former_bytes
            after_bytes = min(self._cache.ready_bytes + self._step_bytes, self._cache.capacity_bytes)
            if after_bytes + former_bytes <= self._cache.capacity_bytes:
                return
            if not is_told:
                is_told = True
                logger.info(
                    "%s waits to grow: engines still have %s of a former server",
                    self._label,
                    describe_size(former_bytes),
                )
            if not self._stopped.is_set():
                self._changed.wait()

    def _tenths(self) -> int:
        return self._cache.ready_bytes * 10 // self._cache.capacity_bytes

    def _describe(self) -> str:
        return f"{describe_size(self._cache.ready_bytes)} of {describe_size(self._cache.capacity_bytes)}"
