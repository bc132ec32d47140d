"""Grows a pool to its full size while it serves, and gives memory back while it is short."""

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

    def __init__(
        self,
        cache: LocalCache,
        *,
        name: str = "",
        step_bytes: int = 0,
        segment_bytes: int = 0,
        floor_bytes: int = 0,
        retry_s: float = RETRY_S,
    ) -> None:
        """Grows a cache by `step_bytes` at a time, and gives back segments of `segment_bytes` down to `floor_bytes`.
        `name` is the domain's, as the log is to call it."""
        self._cache = cache
        self._label = f"the memory of domain {name!r}" if name else "the memory"
        self._step_bytes = step_bytes
        self._retry_s = retry_s
        self._segment_bytes = segment_bytes or cache.capacity_bytes
        segments = max(-(-floor_bytes // self._segment_bytes), 1)
        self._floor_bytes = min(segments * self._segment_bytes, cache.capacity_bytes)
        self._former_bytes = 0
        self._keep_free_bytes = 0
        self._target_bytes: int | None = None
        """The size to which the pool gives memory back; None: it may grow."""
        self._pinned_bytes = 0
        self._told_bytes = 0
        """The pool's size of which the log has told last, while it gives memory back."""
        self._fault = ""
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Starts the thread if it has not been started and growing was not stopped. Without a thread the pool stays as
        it is, and the next call tries again."""
        is_running = self._thread is not None and self._thread.is_alive()
        is_full = self._cache.ready_bytes == self._cache.capacity_bytes
        if is_running or is_full or self._target_bytes is not None or self._stopped.is_set():
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

    @property
    def ready_bytes(self) -> int:
        return self._cache.ready_bytes

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    @property
    def is_shrinking(self) -> bool:
        """Whether the pool gives memory back, or has done so and does not grow."""
        return self._target_bytes is not None

    def shrink(self, missing_bytes: int, reason: str = "", limited_by: str = "") -> None:
        """Gives back segments of so many bytes together, and goes on with what an earlier call could not give back. It
        does not grow until `resume`. Called by one thread, for which it takes as long as copying 1 GiB does."""
        ready_bytes = self._cache.ready_bytes
        # Memory that is only pinned still will be free soon.
        missing_bytes -= self._pinned_bytes
        if missing_bytes > 0:
            wanted = (ready_bytes - missing_bytes) // self._segment_bytes * self._segment_bytes
            target = min(max(wanted, self._floor_bytes), ready_bytes)
            if self._target_bytes is None:
                self._told_bytes = ready_bytes
            if self._target_bytes is None or target < self._target_bytes:
                self._target_bytes = target
                self._tell_shortage(ready_bytes, target, limited_by)
            self._cache.memory_reason = reason if self._target_bytes < self._cache.capacity_bytes else ""
        if self._target_bytes is None or (ready_bytes <= self._target_bytes and not self._pinned_bytes):
            return
        try:
            shrunk = self._cache.shrink(self._target_bytes)
        except CacheMemoryError as fault:
            if str(fault) != self._fault:
                self._fault = str(fault)
                logger.warning("%s cannot be given back: %s", self._label, fault)
            return
        self._fault = ""
        self._pinned_bytes = shrunk.pinned_bytes
        if shrunk.is_done and self._told_bytes != self._cache.ready_bytes:
            self._told_bytes = self._cache.ready_bytes
            logger.info("%s has been given back in part: %s are left", self._label, self._describe())

    def resume(self, keep_free_bytes: int) -> None:
        """Lets the pool grow again, and leaves so much memory to others from now on."""
        self._keep_free_bytes = keep_free_bytes
        self._target_bytes = None
        self._pinned_bytes = 0
        self._changed.set()
        self.start()

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
        self._cache.memory_reason = "growing"
        logger.info("%s is served and grows: %s so far", self._label, self._describe())
        while not self._stopped.is_set():
            self._await_release()
            try:
                if self._target_bytes is not None:
                    return
                is_growing = self._cache.grow(self._keep_free_bytes)
            except CacheMemoryError as fault:
                # Logged once: other processes' memory may come and go for hours.
                level = logging.DEBUG if is_short else logging.WARNING
                logger.log(level, "%s stays smaller for now, %s: %s", self._label, self._describe(), fault)
                is_short = True
                if self._target_bytes is None:
                    self._cache.memory_reason = "not_free"
                self._stopped.wait(self._retry_s)
                continue
            if not is_growing:
                break
            if self._target_bytes is None:
                self._cache.memory_reason = "growing"
            if self._tenths() > told:
                told = self._tenths()
                logger.debug("%s grows: %s", self._label, self._describe())
        if not self._stopped.is_set() and self._cache.ready_bytes == capacity_bytes:
            self._cache.memory_reason = ""
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
                self._cache.memory_reason = "former"
                logger.info(
                    "%s waits to grow: engines still have %s of a former server",
                    self._label,
                    describe_size(former_bytes),
                )
            if not self._stopped.is_set():
                self._changed.wait()

    def _tell_shortage(self, ready_bytes: int, target_bytes: int, limited_by: str) -> None:
        full_bytes = self._cache.capacity_bytes
        if target_bytes < ready_bytes:
            logger.warning(
                "memory is short (%s), so %s gives %s of its %s back, and keeps %s",
                limited_by,
                self._label,
                describe_size(ready_bytes - target_bytes),
                describe_size(ready_bytes),
                describe_size(target_bytes),
            )
        elif full_bytes > self._floor_bytes:
            logger.warning(
                "memory is short (%s), and %s is at its floor: %s", limited_by, self._label, self._describe()
            )

    def _tenths(self) -> int:
        return self._cache.ready_bytes * 10 // self._cache.capacity_bytes

    def _describe(self) -> str:
        return f"{describe_size(self._cache.ready_bytes)} of {describe_size(self._cache.capacity_bytes)}"
