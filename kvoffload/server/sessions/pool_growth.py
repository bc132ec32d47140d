"""A pool's way to its full size, beside what it serves."""

from __future__ import annotations

import logging
import threading

from kvoffload.cache import LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.units import describe_size

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""After a shortage: what others had may have been given back."""


class PoolGrowth:
    """One thread runs it; `stop` and `close` belong to whoever made it. A shortage ends nothing: the pool is smaller
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
        self._thread = threading.Thread(target=self._run, name="kvoffload-growth", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nothing more is taken from here on but the parts of a step that threads are at."""
        self._stopped.set()
        self._changed.set()
        self._cache.stop_growing()

    def limit(self, former_bytes: int) -> None:
        """Engines still have so much of former servers' memory: together with it the pool has no more than it is to
        have in the end. From any thread."""
        if former_bytes != self._former_bytes:
            self._former_bytes = former_bytes
            self._changed.set()

    def close(self) -> None:
        """Stops, and waits for that."""
        self.stop()
        if self._thread.ident is not None:
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
                # Told once: others' memory may come and go for hours.
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
        """Until the next step has room beside what engines have of former servers, or growing was stopped."""
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
