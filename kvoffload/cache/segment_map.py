"""The memory of another process's cache: slots are written and read here, and nothing else is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.cache.answers import Addresses
from kvoffload.packets import close_all


class SegmentMap:
    """All segments of a cache, mapped. Safe to call from any thread; a forked child does not have the memory."""

    def __init__(self, files: Sequence[int], segment_bytes: int) -> None:
        """Maps segments, and takes their descriptors. ValueError: one is no segment of this size."""
        self._map = native.open_segment_map(list(files), segment_bytes)
        self._bases = np.array(self._map.bases(), np.uint64)
        self._segment_bytes = segment_bytes
        self._signs: list[int] = []
        weakref.finalize(self, close_all, self._signs)

    def keep(self, sign: int) -> None:
        """Takes a descriptor that stays open for as long as this is here: it says that the memory is used still."""
        self._signs.append(sign)

    @property
    def size_bytes(self) -> int:
        return len(self._bases) * self._segment_bytes

    def ranges(self) -> list[tuple[int, int]]:
        """(where it begins in this process, bytes) of each segment."""
        return [(base, self._segment_bytes) for base in self._bases.tolist()]

    def view(self, address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, to be written under a reservation and read under a lease. Keeps the memory alive."""
        return self._map.view(address, size_bytes)

    def pointers(self, addresses: Addresses, record_bytes: int) -> npt.NDArray[np.uint64]:
        """Where slots lie in this process, for a copy engine. ValueError names the first that lies nowhere."""
        addresses = np.asarray(addresses, np.uint64)
        segment, offset = np.divmod(addresses, np.uint64(self._segment_bytes))
        outside = (segment >= len(self._bases)) | (offset > np.uint64(max(self._segment_bytes - record_bytes, 0)))
        if record_bytes > self._segment_bytes or outside.any():
            address = int(addresses[outside][0]) if outside.any() else 0
            raise ValueError(f"no segment has {record_bytes} bytes at {address}")
        pointers: npt.NDArray[np.uint64] = self._bases[segment] + offset
        return pointers
