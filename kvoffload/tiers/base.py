"""The contract of every tier: it takes batches of records, returns tickets, and later the outcome of each record.

Records lie in the caller's memory, by address, from the call until its ticket was polled. A tier that does not answer
costs the timeout of each call and nothing more.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.errors import TierError
from kvoffload.hash_rows import choose_rows
from kvoffload.types import HASH_BYTES

CLOSE_TIMEOUT_S = 30.0
BATCH_LIMIT = 1024
"""Batches submitted and not yet polled; the next one is refused."""

Ticket = int
Addresses = npt.NDArray[np.uint64]
Digests = npt.NDArray[np.uint64]


class RecordOutcome(IntEnum):
    """How a record of a batch ended; the native core has the same numbers."""

    WRITTEN = 2
    """Put: it survives this process, however that ends."""
    DURABLE = 3
    """Put: it survives a loss of power, as far as the tier can say."""
    FOUND = 4
    """Get: the bytes are in the slot and have their digest. Look: it is there."""
    MISSING = 5
    """Get, look, remove: no such record."""
    REMOVED = 6
    DAMAGED = 7
    """Put: the bytes did not have their digest. Get: those of the tier did not; the record is gone."""
    LATE = 8
    """The timeout is over. A put may still take effect; no slot is touched any more."""
    OVER_BUDGET = 9
    """Put: as many bytes as may be written today are."""
    TOO_LARGE = 10
    UNAVAILABLE = 11
    """The tier cannot do it now; its health says why."""
    FAILED = 12
    """The tier tried and could not."""


class TierState(Enum):
    """The abilities of a tier, or of one of its devices, at this moment."""

    OPENING = "opening"
    READY = "ready"
    READ_ONLY = "read_only"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class RecordNames:
    """The names of records of one identity, group and shard: their block hashes, 32 bytes each, in one blob."""

    fingerprint: bytes
    hashes: bytes
    group: int = 0
    shard: int = 0

    def __post_init__(self) -> None:
        if len(self.fingerprint) != HASH_BYTES or len(self.hashes) % HASH_BYTES:
            raise TierError(
                f"a fingerprint of {len(self.fingerprint)} bytes and hashes of {len(self.hashes)} name no records",
                remedy="give 32 bytes of fingerprint and 32 of each hash",
            )

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def part(self, chosen: slice) -> RecordNames:
        """Returns the names of a range of the records."""
        if (chosen.start, chosen.stop) == (0, len(self)):
            return self
        return replace(self, hashes=self.hashes[chosen.start * HASH_BYTES : chosen.stop * HASH_BYTES])

    def choose(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> RecordNames:
        """Returns the names of some of the records: by their places in rising order, or by a truth for each."""
        hashes = choose_rows(self.hashes, chosen)
        return self if len(hashes) == len(self.hashes) else replace(self, hashes=hashes)


def _make_none() -> npt.NDArray[np.uint64]:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """Records of one size, consecutive blocks of a prefix in their order, and the slots that hold or receive them."""

    names: RecordNames
    slots: Addresses = field(default_factory=_make_none)
    _: KW_ONLY
    record_bytes: int = 0
    digests: Digests = field(default_factory=_make_none)
    """The digest of each record. This attribute and the following ones are for puts alone."""
    parents: bytes = b""
    """The hash of the block before each record's block, in one blob."""
    is_durable: bool = False
    """The batch ends only when its records are durable."""

    def parent(self, at: int) -> bytes:
        """Returns the hash before that of a record; zeros where none was given."""
        return self.parents[at * HASH_BYTES : (at + 1) * HASH_BYTES] or bytes(HASH_BYTES)

    def part(self, chosen: slice) -> RecordBatch:
        """Returns a batch of a range of the records."""
        return replace(
            self,
            names=self.names.part(chosen),
            slots=self.slots[chosen],
            digests=self.digests[chosen],
            parents=self.parents[chosen.start * HASH_BYTES : chosen.stop * HASH_BYTES],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedBatch:
    """One entry a record. `digests` and `parents` (32 bytes each) are those of the records that were found."""

    ticket: Ticket
    outcomes: npt.NDArray[np.uint8]
    digests: Digests
    parents: bytes

    def count(self, outcome: RecordOutcome) -> int:
        """Returns how many records ended so."""
        return int(np.count_nonzero(self.outcomes == outcome))


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanPage:
    """Live records: parallel blobs and arrays. `cursor` goes on with the scan; 0 at its end."""

    cursor: int
    fingerprints: bytes
    hashes: bytes
    groups: npt.NDArray[np.uint32]
    shards: npt.NDArray[np.uint32]
    record_bytes: npt.NDArray[np.uint64]
    digests: Digests
    parents: bytes

    def __len__(self) -> int:
        return len(self.digests)


@dataclass(frozen=True, kw_only=True)
class TierHealth:
    """One line of a tier: of a device, where it has several. `reason` is one line. A
    place that is ready has one only if it can keep less than its capacity."""

    name: str
    state: TierState
    reason: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    records: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of events since the tier was opened, by name."""


class Tier(Protocol):
    """Safe to call from any thread. No call waits for the tier's place except `scan` and `close`.

    `put`, `get`, `look` and `remove` return None where BATCH_LIMIT batches are under way; TierError once it is closed.
    """

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that the tier takes, however many are put."""
        ...

    def put(self, batch: RecordBatch, *, timeout_s: float) -> Ticket | None:
        """A record whose bytes don't have their digest is not stored."""
        ...

    def get(self, names: RecordNames, slots: Addresses, *, record_bytes: int, timeout_s: float) -> Ticket | None:
        """Reads records into slots. A record that is found has that name and length; other slots' bytes mean
        nothing."""
        ...

    def remove(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        """Removed records don't come back after a restart."""
        ...

    @property
    def knows_all(self) -> bool:
        """Whether `contains` knows all that is there. False where others write to the place, too: `look` asks it."""
        ...

    def contains(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Returns which records are there now, as far as the tier knows without asking the place."""
        ...

    def look(self, names: RecordNames, *, timeout_s: float) -> Ticket | None:
        """Ends as FOUND or MISSING, without the bytes."""
        ...

    def poll(self) -> list[FinishedBatch]:
        """Batches that have ended, or whose timeout is over, each told once."""
        ...

    def scan(self, cursor: int = 0, *, timeout_s: float) -> ScanPage:
        """Some of the live records, from the beginning or from where a page ended. TierError: no answer in time."""
        ...

    def health(self) -> list[TierHealth]:
        """Returns the state of each place, at least one."""
        ...

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` may have something to tell."""
        ...

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends what is under way. No slot is touched afterwards, also if TierError says that the place hangs."""
        ...
