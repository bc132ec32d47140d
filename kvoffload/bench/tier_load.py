"""Records of a benchmark that go to a tier and come back, some batches at a time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import BenchmarkError
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.tiers.base import RecordBatch, RecordNames, RecordOutcome, Ticket, Tier

BATCH_RECORDS = 16
BATCHES_AT_ONCE = 8
TIMEOUT_S = 60.0


@dataclass(eq=False)
class Records:
    """Memory for so many records, and their names. Each round of puts has a fingerprint of its own."""

    record_bytes: int
    count: int
    memory: npt.NDArray[np.uint8]
    round: int = 0
    batch_records: int = BATCH_RECORDS
    batches_at_once: int = BATCHES_AT_ONCE

    @property
    def fingerprint(self) -> bytes:
        return self.round.to_bytes(32, "little")

    def names(self, order: npt.NDArray[np.intp]) -> RecordNames:
        hashes = np.zeros((len(order), 4), np.uint64)
        hashes[:, 0] = order
        hashes[:, 1] = self.record_bytes
        return RecordNames(fingerprint=self.fingerprint, hashes=hashes.tobytes())

    def slots(self, order: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        return np.uint64(self.memory.ctypes.data) + order.astype(np.uint64) * np.uint64(self.record_bytes)

    def digests(self) -> npt.NDArray[np.uint64]:
        names = self.names(np.arange(self.count))
        made = native.digest_records(
            self.memory.data,
            self.record_bytes,
            fingerprint=names.fingerprint,
            block_hashes=names.hashes,
            group=0,
            shard=0,
        )
        return np.frombuffer(made, np.uint64)


def as_a_server(record_bytes: int, count: int, memory: npt.NDArray[np.uint8]) -> Records:
    """Makes records in batches of the size and number in which a server gives them to a tier."""
    settings = TierSettings()
    batch = max(settings.piece_bytes // record_bytes, 1)
    at_once = max(settings.under_way_bytes // (batch * record_bytes), 1)
    return Records(record_bytes, count, memory, batch_records=batch, batches_at_once=at_once)


def put_all(tier: Tier, records: Records) -> float:
    """Seconds until records of a new fingerprint are durable. Their digests are made before."""
    records.round += 1
    digests = records.digests()
    begun = time.perf_counter()
    order = np.arange(records.count)
    parts = [order[at : at + records.batch_records] for at in range(0, records.count, records.batch_records)]

    def submit(part: npt.NDArray[np.intp]) -> Ticket | None:
        names, slots = records.names(part), records.slots(part)
        size, sums = records.record_bytes, digests[part]
        batch = RecordBatch(names, slots, record_bytes=size, digests=sums, is_durable=True)
        return tier.put(batch, timeout_s=TIMEOUT_S)

    keep_going(tier, [partial(submit, part) for part in parts], RecordOutcome.DURABLE, records.batches_at_once)
    return time.perf_counter() - begun


def get_all(tier: Tier, records: Records, order: npt.NDArray[np.intp]) -> float:
    """Seconds until these records were read to where they were put from."""
    parts = [order[at : at + records.batch_records] for at in range(0, len(order), records.batch_records)]
    begun = time.perf_counter()

    def submit(part: npt.NDArray[np.intp]) -> Ticket | None:
        return tier.get(
            records.names(part), records.slots(part), record_bytes=records.record_bytes, timeout_s=TIMEOUT_S
        )

    keep_going(tier, [partial(submit, part) for part in parts], RecordOutcome.FOUND, records.batches_at_once)
    return time.perf_counter() - begun


def keep_going(tier: Tier, calls: list[Callable[[], Ticket | None]], wanted: RecordOutcome, at_once: int) -> None:
    """Runs calls, at most `at_once` at a time, until all have ended. BenchmarkError: a record ended otherwise than
    `wanted`."""
    under_way = 0
    waiting = iter(calls)
    for call in waiting:
        call()
        under_way += 1
        if under_way == at_once:
            break
    while under_way:
        select.select([tier], [], [], TIMEOUT_S)
        for batch in tier.poll():
            under_way -= 1
            if batch.count(wanted) != len(batch.outcomes):
                raise BenchmarkError(f"records ended as {sorted(set(batch.outcomes.tolist()))}, not {wanted.name}")
            following = next(waiting, None)
            if following is not None:
                following()
                under_way += 1
