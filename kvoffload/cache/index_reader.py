"""Looking up in a cache of another process, without a message to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload import native
from kvoffload.cache.ask import Ask


class IndexReader:
    """Safe to call from any thread, and in forked children. An answer may be over in the next moment: only an acquire
    holds anything. When the writer has died, answers are as of its death."""

    def __init__(self, file: int) -> None:
        """Maps the index read-only. Takes the descriptor."""
        self._reader = native.open_index_reader(file)

    def lookup(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        """Returns which blocks are readable now."""
        return np.frombuffer(self._reader.lookup(name_space, group, hashes), dtype=np.bool_)

    def find_boundary(self, name_space: int, ask: Ask) -> int:
        """Returns the boundary that an `acquire` would find now; `local` if there is none."""
        return self._reader.find_boundary(name_space, ask.chain, ask.local, ask.limit, ask.alignment)

    @property
    def version(self) -> int:
        """A number that grows whenever an answer may have changed."""
        return self._reader.version()

    @property
    def ready_bytes(self) -> int:
        """How many bytes of the segments, from the first one's beginning, have their memory. It becomes less where a
        server gives memory back."""
        return self._reader.ready_bytes()

    @property
    def leaving_from(self) -> int:
        """Address from which on the server wants to give memory back; 0: it does not."""
        return self._reader.leaving_from()

    def mark_pinned(self, segment: int, is_pinned: bool) -> None:
        """Marks a segment that a driver is to pin, before `ready_bytes` is looked at again, or takes the mark away when
        it is unpinned. Meanwhile the server does not give its memory back. The mark is this process's."""
        self._reader.mark_pinned(segment, is_pinned)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool in slots that are given out."""
        return self._reader.used_bytes()

    @property
    def boot_id(self) -> int:
        """The number of the process that writes: another one is another process."""
        return self._reader.boot_id()
