"""The bytes of records, by slot: what one worker holds. Each record has memory of its own, freed when it is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvoffload.errors import StorageError
from kvoffload.native import sha256

if TYPE_CHECKING:
    import torch


class PlainRecords:
    """Used by one thread at a time. With `has_digests` every record is checked when it is read."""

    def __init__(self, *, has_digests: bool) -> None:
        self._has_digests = has_digests
        self._records: dict[int, torch.Tensor] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._records)

    def write(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Keeps a copy of each row (uint8, on the host)."""
        for slot, row in zip(slots, rows, strict=True):
            record = row.clone()
            self._records[slot] = record
            if self._has_digests:
                self._digests[slot] = sha256(record.numpy().data)

    def read(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """The records themselves, not copies. StorageError for one that is absent or not what was written."""
        found = []
        for slot in slots:
            record = self._records.get(slot)
            if record is None:
                raise StorageError(f"slot {slot} holds no record", remedy="", slot=slot)
            if self._has_digests and sha256(record.numpy().data) != self._digests[slot]:
                raise StorageError(f"slot {slot} does not hold what was written to it", remedy="", slot=slot)
            found.append(record)
        return found

    def drop(self, slots: Iterable[int]) -> None:
        """Slots that nobody asks for again; one that was never written is fine."""
        for slot in slots:
            self._records.pop(slot, None)
            self._digests.pop(slot, None)

    def clear(self) -> None:
        """Everything."""
        self._records.clear()
        self._digests.clear()
