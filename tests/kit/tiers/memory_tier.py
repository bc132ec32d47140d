"""A tier over a dictionary: what the contract means, in the fewest lines."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import TierError
from kvoffload.tiers.base import (
    BATCH_LIMIT,
    Addresses,
    FinishedBatch,
    RecordBatch,
    RecordNames,
    RecordOutcome,
    ScanPage,
    Ticket,
    TierHealth,
    TierState,
)

Key = tuple[bytes, bytes, int, int]


def keys_of(names: RecordNames) -> list[Key]:
    hashes = [names.hashes[at : at + 32] for at in range(0, len(names.hashes), 32)]
    return [(names.fingerprint, one, names.group, names.shard) for one in hashes]


@dataclass(frozen=True)
class Stored:
    data: bytes
    digest: int
    parent: bytes


class MemoryTier:
    """A tier for one thread."""

    knows_all = True

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self._records: dict[Key, Stored] = {}
        self._ended: list[FinishedBatch] = []
        self._last_ticket = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def put(self, batch: RecordBatch, *, timeout_s: float) -> Ticket | None:
        names, slots, record_bytes = batch.names, batch.slots, batch.record_bytes

        def put_one(i: int, key: Key) -> RecordOutcome:
            data = ctypes.string_at(int(slots[i]), record_bytes)
            made = native.digest_record(data, fingerprint=key[0], block_hash=key[1], group=key[2], shard=key[3])
            if made != int(batch.digests[i]):
                return RecordOutcome.DAMAGED
            while self._records and self._used() + record_bytes > self.capacity_bytes:
                del self._records[next(iter(self._records))]
            self._records[key] = Stored(data, made, batch.parents[32 * i : 32 * i + 32] or bytes(32))
            return RecordOutcome.DURABLE if batch.is_durable else RecordOutcome.WRITTEN

        return self._end(names, [put_one(i, key) for i, key in enumerate(keys_of(names))])

    def get(self, names: RecordNames, slots: Addresses, *, record_bytes: int, timeout_s: float) -> Ticket | None:
        found = [self._records.get(key) for key in keys_of(names)]
        outcomes = []
        for i, record in enumerate(found):
            if record is None or len(record.data) != record_bytes:
                outcomes.append(RecordOutcome.MISSING)
                continue
            ctypes.memmove(int(slots[i]), record.data, record_bytes)
            outcomes.append(RecordOutcome.FOUND)
        return self._end(names, outcomes, found)

    def remove(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        gone = [self._records.pop(key, None) for key in keys_of(names)]
        return self._end(names, [RecordOutcome.MISSING if one is None else RecordOutcome.REMOVED for one in gone])

    def look(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        found = [key in self._records for key in keys_of(names)]
        return self._end(names, [RecordOutcome.FOUND if one else RecordOutcome.MISSING for one in found])

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.array([key in self._records for key in keys_of(names)], np.bool_)

    def poll(self) -> list[FinishedBatch]:
        ended, self._ended = self._ended, []
        if ended:
            os.eventfd_read(self._event)
        return ended

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        chosen = list(self._records.items())[cursor : cursor + 8]
        following = cursor + 8 if cursor + 8 < len(self._records) else 0
        return ScanPage(
            cursor=following,
            fingerprints=b"".join(key[0] for key, _ in chosen),
            hashes=b"".join(key[1] for key, _ in chosen),
            groups=np.array([key[2] for key, _ in chosen], np.uint32),
            shards=np.array([key[3] for key, _ in chosen], np.uint32),
            record_bytes=np.array([len(one.data) for _, one in chosen], np.uint64),
            digests=np.array([one.digest for _, one in chosen], np.uint64),
            parents=b"".join(one.parent for _, one in chosen),
        )

    def health(self) -> list[TierHealth]:
        return [
            TierHealth(
                name="memory",
                state=TierState.ABSENT if self._is_closed else TierState.READY,
                reason="closed" if self._is_closed else "",
                capacity_bytes=self.capacity_bytes,
                used_bytes=self._used(),
                records=len(self._records),
            )
        ]

    def fileno(self) -> int:
        return self._event

    def close(self, timeout_s: float = 0.0) -> None:
        if not self._is_closed:
            self._is_closed = True

    def _used(self) -> int:
        return sum(len(one.data) for one in self._records.values())

    def _end(
        self, names: RecordNames, outcomes: list[RecordOutcome], found: list[Stored | None] | None = None
    ) -> Ticket | None:
        if self._is_closed:
            raise TierError("the memory tier is closed")
        if len(self._ended) >= BATCH_LIMIT:
            return None
        self._last_ticket += 1
        records = found or [None] * len(names)
        self._ended.append(
            FinishedBatch(
                ticket=self._last_ticket,
                outcomes=np.array(outcomes, np.uint8),
                digests=np.array([one.digest if one else 0 for one in records], np.uint64),
                parents=b"".join(one.parent if one else bytes(32) for one in records),
            )
        )
        os.eventfd_write(self._event, 1)
        return self._last_ticket
