"""The disk tier: log-structured segments on one or several devices. docs/disk.md says what holds."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import TierError
from kvoffload.tiers.base import (
    BATCH_LIMIT,
    CLOSE_TIMEOUT_S,
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
from kvoffload.tiers.damage_log import DamageLog
from kvoffload.tiers.record_coder import Coding
from kvoffload.types import HASH_BYTES
from kvoffload.units import format_size, milliseconds

PUT, GET, REMOVE = range(3)
"""The native core's verbs."""

_LOOKS = 1 << 63
"""Tickets of looks are none of the native core's."""


_CODINGS = (Coding.OFF, Coding.ON, Coding.AUTO)
"""The ways of coding, in the order of the native core's numbers."""


@dataclass(frozen=True, kw_only=True)
class DiskFolder:
    """One device: an existing folder of this user alone (mode 0700), and the most bytes that its segments may take."""

    path: Path
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """`daily_bytes`: what each device may be given in 24 hours; 0 for any. `may_create`: an empty folder is taken.

    `compress`: which records are written in a lossless code; those that are there are read in any case.
    """

    folders: Sequence[DiskFolder]
    segment_bytes: int = 128 << 20
    """The same for every capacity, so that a folder is good for another one, too."""
    daily_bytes: int = 0
    compress: Coding = Coding.OFF
    seal_keys: native.SealKeys | None = None
    """Keys with which all records are sealed, and others are not read; None: records are not sealed."""
    record_limit_bytes: int = 32 << 20
    may_create: bool = True
    io_engine: str = "auto"
    """`io_uring`, `threads`, or `auto` for the first where the kernel has it."""
    probe_interval_s: float = 2.0
    batch_limit: int = BATCH_LIMIT

    @property
    def capacity_bytes(self) -> int:
        return sum(folder.capacity_bytes for folder in self.folders)

    def describe(self) -> str:
        """Describes the folders in a few words."""
        folders = f"{len(self.folders)} folders" if len(self.folders) > 1 else str(self.folders[0].path)
        return f"{format_size(self.capacity_bytes)} of disk in {folders}"

    def open_tier(self) -> DiskTier:
        """Starts a thread a device. TierError."""
        return DiskTier(self)


class DiskTier:
    """Keeps records in folders. One that cannot be had is no fault: `health` says why, and it is tried again later."""

    knows_all = True

    def __init__(self, settings: DiskSettings, *, memory: object = None) -> None:
        """Starts a thread a device. `memory`: whatever owns the slots; held until the tier is closed.

        TierError: it cannot be opened with these settings.
        """
        self._settings = settings
        self._lock = threading.Lock()
        self._looks = 0
        self._looked: list[FinishedBatch] = []
        self._damage_log = DamageLog(settings.describe() if settings.folders else "disk")
        try:
            self._core = native.create_disk_store(
                [(str(folder.path), folder.capacity_bytes) for folder in settings.folders],
                segment_bytes=settings.segment_bytes,
                daily_bytes=settings.daily_bytes,
                coding=_CODINGS.index(settings.compress),
                record_limit_bytes=settings.record_limit_bytes,
                may_create=settings.may_create,
                io_engine=settings.io_engine,
                probe_ms=milliseconds(settings.probe_interval_s),
                batch_limit=settings.batch_limit,
                seal_keys=settings.seal_keys,
                memory=memory,
            )
        except (ValueError, RuntimeError) as fault:
            raise TierError(f"the disk tier cannot be made: {fault}") from fault
        # The core's file is an epoll of what ends there; what ends here is one more of it.
        self._has_looked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with select.epoll.fromfd(os.dup(self._core.file())) as files:
            files.register(self._has_looked, select.EPOLLIN)

    @property
    def capacity_bytes(self) -> int:
        return self._settings.capacity_bytes

    def put(self, batch: RecordBatch, *, timeout_s: float) -> Ticket | None:
        return self._submit(PUT, batch, timeout_s)

    def get(self, names: RecordNames, slots: Addresses, *, record_bytes: int, timeout_s: float) -> Ticket | None:
        return self._submit(GET, RecordBatch(names, slots, record_bytes=record_bytes), timeout_s)

    def remove(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        return self._submit(REMOVE, RecordBatch(names), timeout_s)

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        found = self._core.contains(names.fingerprint, names.hashes, names.group, names.shard)
        return np.frombuffer(found, np.bool_)

    def look(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        found = np.where(self.contains(names), RecordOutcome.FOUND, RecordOutcome.MISSING).astype(np.uint8)
        with self._lock:
            if self._has_looked < 0:
                raise TierError("the disk tier took no batch: it is closed")
            if len(self._looked) >= self._settings.batch_limit:
                return None
            self._looks += 1
            batch = FinishedBatch(
                ticket=_LOOKS | self._looks,
                outcomes=found,
                digests=np.zeros(len(names), np.uint64),
                parents=bytes(HASH_BYTES * len(names)),
            )
            self._looked.append(batch)
            os.eventfd_write(self._has_looked, 1)
        return batch.ticket

    def poll(self) -> list[FinishedBatch]:
        with self._lock:
            looked, self._looked = self._looked, []
            if looked and self._has_looked >= 0:
                os.eventfd_read(self._has_looked)
        ended = [
            FinishedBatch(
                ticket=ticket,
                outcomes=np.frombuffer(outcomes, np.uint8),
                digests=np.frombuffer(digests, np.uint64),
                parents=parents,
            )
            for ticket, outcomes, digests, parents in self._core.poll()
        ]
        damaged = sum(batch.count(RecordOutcome.DAMAGED) for batch in ended)
        if damaged:
            with self._lock:
                self._damage_log.note(damaged)
        return looked + ended

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        try:
            page = self._core.scan(cursor, milliseconds(timeout_s))
        except RuntimeError as fault:
            raise TierError(f"the disk tier cannot be listed: {fault}") from fault
        following, fingerprints, hashes, groups, shards, lengths, digests, parents = page
        return ScanPage(
            cursor=following,
            fingerprints=fingerprints,
            hashes=hashes,
            groups=np.frombuffer(groups, np.uint32),
            shards=np.frombuffer(shards, np.uint32),
            record_bytes=np.frombuffer(lengths, np.uint64),
            digests=np.frombuffer(digests, np.uint64),
            parents=parents,
        )

    def health(self) -> list[TierHealth]:
        return [
            TierHealth(
                name=str(folder.path),
                state=TierState(found["state"]),
                reason=found["reason"],
                capacity_bytes=found["capacity_bytes"],
                used_bytes=found["live_bytes"],
                records=found["records"],
                counts={name: number for name, number in found.items() if isinstance(number, int)},
            )
            for folder, found in zip(self._settings.folders, self._core.health(), strict=True)
        ]

    def wait_open(self, timeout_s: float) -> bool:
        """Waits until every device has been opened, or refused; False if that takes longer."""
        return self._core.wait_open(milliseconds(timeout_s))

    def fileno(self) -> int:
        return self._core.file()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        try:
            self._core.close(milliseconds(timeout_s))
        except RuntimeError as fault:
            raise TierError(f"the disk tier was not closed: {fault}") from fault
        finally:
            with self._lock:
                if self._has_looked >= 0:
                    os.close(self._has_looked)
                    self._has_looked = -1

    def _submit(self, verb: int, batch: RecordBatch, timeout_s: float) -> Ticket | None:
        names = batch.names
        try:
            return self._core.submit(
                verb,
                names.fingerprint,
                names.hashes,
                names.group,
                names.shard,
                np.ascontiguousarray(batch.slots, np.uint64),
                batch.record_bytes,
                np.ascontiguousarray(batch.digests, np.uint64),
                batch.parents,
                batch.is_durable,
                milliseconds(timeout_s),
            )
        except ValueError as fault:
            raise TierError(f"these records cannot be asked for: {fault}") from fault
        except RuntimeError as fault:
            raise TierError(f"the disk tier took no batch: {fault}") from fault

    def __str__(self) -> str:
        return self._settings.describe()
