"""One rank's pages between SGLang's host pool and the cache, for the threads by which HiCache fetches and backs up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.errors import NativeError
from kvoffload.sglang.page_linker import GroupRows, PageLinker

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvoffload.sglang.weights import WeightMask

ONLY_GROUP = 0
"""Host pools with windows are not served."""
SLOTS_WAIT_S = 2.0
"""For room, when pages are backed up: a thread of its own waits, and no request does."""
SLOTS_LOOK_S = 0.002
END_LOOK_S = 1.0
CHANGED = "the weights changed, and HiCache was not flushed"


class HostPages:
    """Any thread may call it; one call at a time is at work."""

    def __init__(self, linker: PageLinker, weights: WeightMask) -> None:
        self._linker = linker
        self._weights = weights
        self._lock = threading.Lock()
        self._has_slots = True
        """Whether there were slots at the last look. Where there is no server, or no room, one backup waits for it and
        the later ones do not."""

    def count(self, keys: Sequence[str]) -> int:
        """Pages, from the first on, that are restorable now. Nothing is held, because HiCache does not say that it will
        not fetch them: what is evicted before it does is a shorter hit."""
        with self._lock:
            pages = self._find(keys, is_counted=False)
            if pages:
                self._linker.cancel_load(keys[0])
            return pages

    def fetch(self, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> int:
        """Pages, from the first on, that are in these rows of the host pool now.

        HiCache gives the rows to others once this has returned, so that a copy that does not end is waited for, by
        this thread alone.
        """
        try:
            with self._lock:
                return self._fetch(keys, rows)
        except NativeError as fault:
            self.note_fault("fetch", fault)
            while not self._linker.has_ended():
                time.sleep(END_LOOK_S)
            return 0

    def back_up(self, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> bool:
        """Returns when the rows may be written to again: whether all pages are kept."""
        page, at, is_whole = self._linker.settings.page_size, 0, True
        while at < len(keys) and is_whole:
            # More than there are slots for are kept piece by piece.
            end = at + max(1, min(self._await_slots(len(keys) - at), len(keys) - at))
            with self._lock:
                self._look_at_weights()
                self._linker.offload([GroupRows(ONLY_GROUP, keys[at:end], rows[at * page : end * page])])
                self._linker.end_saves()
                is_whole = self._linker.pop_done()
            at = end
        return is_whole

    def close(self) -> None:
        with self._lock:
            self._linker.close()

    def note_fault(self, hook: str, fault: Exception) -> None:
        self._linker.note_fault(hook, fault)

    def _fetch(self, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> int:
        pages = self._find(keys, is_counted=True)
        if not pages:
            return 0
        wanted = GroupRows(ONLY_GROUP, keys[:pages], rows[: pages * self._linker.settings.page_size])
        is_loaded = self._linker.load(keys[0], [wanted])
        return pages if is_loaded and all(self._linker.take_loaded()) else 0

    def _find(self, keys: Sequence[str], *, is_counted: bool) -> int:
        if not keys:
            return 0
        self._look_at_weights()
        self._linker.begin_step()
        return max(self._linker.lookup(keys[0], keys, is_counted=is_counted), default=0)

    def _look_at_weights(self) -> None:
        """Looks for an update of the weights; SGLang does not tell a storage that it has emptied its caches, but starts
        its threads again each time.

        Pages that are saved after an update have names that no other engine finds: looking at all weights may take
        longer than SGLang waits for these threads to end.
        """
        if not self._weights.has_changed():
            return
        updates = self._weights.updates
        # One that begins after this look is seen at the next.
        seen = updates.count
        if updates.is_of_later_thread and not updates.is_open and self._weights.is_told:
            self._linker.reset(self._weights.invent(seen))
            return
        if not self._weights.is_told:
            updates.note()
        self._linker.distrust(CHANGED)

    def _await_slots(self, wanted: int) -> int:
        until_s = time.monotonic() + (SLOTS_WAIT_S if self._has_slots else 0.0)
        found = 0
        while True:
            (ready,) = self._linker.cache.ready_slots()
            self._has_slots = ready > 0
            if ready >= wanted or ready == found > 0 or time.monotonic() >= until_s:
                return ready
            found = ready
            time.sleep(SLOTS_LOOK_S)
