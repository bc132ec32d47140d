"""One thread that copies, so that the engine's thread never does: jobs in, ended jobs out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ended:
    """A job that was run. `fault` is None when every byte is where it belongs."""

    name: object
    fault: Exception | None


class CopyThread:
    """`submit` and `take_ended` from one thread, in any order. Jobs run one after the other, as submitted.

    The queue is bounded by its users: loads by the engine's own blocks, saves by pins.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitted = 0

    @property
    def pending(self) -> int:
        """Jobs that have not been taken as ended."""
        return self._submitted

    def start(self) -> None:
        """Once, before the first job."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-copy", daemon=True)
        self._thread.start()

    def submit(self, name: object, job: Callable[[], None]) -> None:
        """Never blocks. What the job raises is its end, and no other job's."""
        self._submitted += 1
        self._jobs.put((name, job))

    def take_ended(self, *, wait_s: float = 0.0) -> list[Ended]:
        """Jobs that ended since the last call. With `wait_s` and none ended yet, waits that long for the first."""
        ended: list[Ended] = []
        while self._submitted:
            try:
                ended.append(self._ended.get(timeout=wait_s) if wait_s and not ended else self._ended.get_nowait())
            except queue.Empty:
                break
            self._submitted -= 1
        return ended

    def close(self) -> None:
        """Runs what was submitted, then ends. Within a bound: a copy that hangs keeps its memory, and is told."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the copy thread did not end within %.0f s; its memory is left to it", CLOSE_TIMEOUT_S)
        self._thread = None

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            name, job = item
            try:
                job()
            except Exception as fault:  # noqa: BLE001  (a job's fault, of whatever kind, is its result)
                # Without its frames: their variables are views of engine memory, which may be about to be freed.
                self._ended.put(Ended(name, fault.with_traceback(None)))
            else:
                self._ended.put(Ended(name, None))
