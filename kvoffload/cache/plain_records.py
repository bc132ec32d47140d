"""The bytes of records, by slot: what one worker holds. Each record has memory of its own, freed when it is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.errors import StorageError


class Record:
    """Host memory at an address that stays. Whoever copies holds the record: its memory goes with the last holder."""

    __slots__ = ("address", "digest", "memory", "slot")

    def __init__(self, slot: int, size_bytes: int) -> None:
        self.slot = slot
        self.memory: npt.NDArray[np.uint8] = np.empty(size_bytes, np.uint8)
        self.address = int(self.memory.__array_interface__["data"][0])
        self.digest: int | None = None
        """The digest sum of what was written, if it was made."""


class PlainRecords:
    """Used by one thread at a time.

        reserve ──► memory that nobody finds ──commit──► acquire, any number of times ──drop──► gone for new readers

    A record that is never committed goes with its last holder.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def reserve(self, slots: Sequence[int], sizes: Sequence[int]) -> list[Record]:
        """Memory to write to, one piece per slot. MemoryError where there is none."""
        return [Record(slot, size_bytes) for slot, size_bytes in zip(slots, sizes, strict=True)]

    def commit(self, records: Iterable[Record], digests: Sequence[int] | None = None) -> None:
        """Every byte of these is written; a slot that is written again has the new record from now on."""
        for index, record in enumerate(records):
            record.digest = None if digests is None else digests[index]
            self._records[record.slot] = record

    def acquire(self, slots: Sequence[int], sizes: Sequence[int]) -> list[Record]:
        """The records to read from. StorageError for one that is absent or of another size."""
        found = []
        for slot, size_bytes in zip(slots, sizes, strict=True):
            record = self._records.get(slot)
            if record is None:
                raise StorageError(f"slot {slot} holds no record", remedy="", slot=slot)
            if record.memory.nbytes != size_bytes:
                raise StorageError(
                    f"slot {slot} holds {record.memory.nbytes} bytes, a record here has {size_bytes}",
                    remedy="",
                    slot=slot,
                )
            found.append(record)
        return found

    def drop(self, slots: Iterable[int]) -> None:
        """Slots that nobody asks for again; one that was never written is fine."""
        for slot in slots:
            self._records.pop(slot, None)

    def clear(self) -> None:
        """Everything."""
        self._records.clear()


def check_digests(records: Iterable[Record], digests: Sequence[int]) -> None:
    """`digests`: of what was read from them. StorageError for the first record that is not what was written to it."""
    for record, digest in zip(records, digests, strict=True):
        if record.digest is not None and record.digest != digest:
            raise StorageError(f"slot {record.slot} does not hold what was written to it", remedy="", slot=record.slot)
