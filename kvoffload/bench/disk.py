"""How close does the disk tier come to plain I/O on the same file system, and how much does it write?"""

from __future__ import annotations

import select
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.file_io import FileLoad, find_fio, time_file_load
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import RecordNames, RecordOutcome, Ticket, TierState
from kvoffload.tiers.disk import DiskFolder, DiskTerms, DiskTier

DATA_BYTES = 256 << 20
"""Of one sample."""
SEGMENT_BYTES = 64 << 20
SEGMENTS = 12
LARGE, SMALL = 1 << 20, 64 << 10
BATCH_RECORDS = 16
BATCHES_AT_ONCE = 8
DEPTH = 32
TIMEOUT_S = 60.0
TURNOVERS = 3
"""How often the full disk is written over where write amplification is counted."""


def rate_goal(ratio: float) -> Goal:
    return Goal(Measure.RATIO, Bound.AT_LEAST, ratio)


AMPLIFICATION_GOAL = Goal(Measure.VALUE, Bound.AT_MOST, 1.2)


@dataclass(eq=False)
class Records:
    """Memory for DATA_BYTES of records, and their names. Each round of puts has a fingerprint of its own."""

    record_bytes: int
    count: int
    memory: npt.NDArray[np.uint8]
    round: int = 0

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


@dataclass(frozen=True)
class Places:
    """What is measured, and the file of its limit."""

    tier: DiskTier
    limit: Path


class DiskBenchmark:
    """In a folder below the working one, which is gone afterwards: `cd` to the file system that is meant."""

    name = "disk"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second beside fio's or a plain loop's; bytes written per byte put, at a full disk; and
        what an engine notices of it."""
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="kvoffload-bench-") as folder:
            tier = open_tier(Path(folder) / "tier")
            try:
                yield from self._rates(Places(tier, Path(folder) / "limit"), progress)
                progress("a full disk, written over and over")
                yield self._amplification(tier)
            finally:
                tier.close()
            # They bring ZeroMQ, which a command line need not wait for.
            from kvoffload.bench.tiered import measure_engine

            yield from measure_engine(self.name, Path(folder), progress)

    def _rates(self, places: Places, progress: Progress) -> Iterator[Result]:
        tier = places.tier
        memory = np.random.default_rng(3).integers(0, 256, DATA_BYTES, np.uint8)
        large = Records(LARGE, DATA_BYTES // LARGE, memory)
        small = Records(SMALL, DATA_BYTES // SMALL, memory)
        for _ in range(SEGMENTS * SEGMENT_BYTES // DATA_BYTES + 1):
            put_all(tier, large)  # so that every segment has been written once, as fio's file has
        progress("records of 1 MiB, written")
        yield self._row(places, "write", large, LARGE, rate_goal(0.85))
        progress("records of 1 MiB, read")
        yield self._row(places, "read", large, LARGE, rate_goal(0.85))
        put_all(tier, small)
        progress("records of 64 KiB of one prefix, read")
        yield self._row(places, "read", small, LARGE, rate_goal(0.85))
        progress("records of 64 KiB at random, read")
        yield self._row(places, "read at random", small, SMALL, rate_goal(0.75))

    def _row(self, places: Places, what: str, records: Records, block_bytes: int, goal: Goal) -> Result:
        load = FileLoad(
            path=places.limit,
            size_bytes=DATA_BYTES,
            block_bytes=block_bytes,
            depth=DEPTH if block_bytes == SMALL else BATCHES_AT_ONCE,
            is_write=what == "write",
            is_random=what == "read at random",
        )
        order = np.arange(records.count)
        if what == "read at random":
            np.random.default_rng(4).shuffle(order)
        tier = places.tier
        call = (lambda: put_all(tier, records)) if what == "write" else (lambda: get_all(tier, records, order))
        pair = measure_timed_pair(call, lambda: time_file_load(load))
        return Result(
            name=self.name,
            value=DATA_BYTES / pair.value_s,
            unit="B/s",
            limit=DATA_BYTES / pair.limit_s,
            spread=pair.spread,
            goal=goal,
            params={
                "what": what,
                "record_bytes": records.record_bytes,
                "limit_block_bytes": block_bytes,
                "limit_by": "fio" if find_fio() else "loop",
            },
        )

    def _amplification(self, tier: DiskTier) -> Result:
        records = Records(SMALL, DATA_BYTES // SMALL, np.random.default_rng(5).integers(0, 256, DATA_BYTES, np.uint8))
        records.round = 1 << 32
        before = tier.health()[0].counts
        rounds = -(-TURNOVERS * SEGMENTS * SEGMENT_BYTES // DATA_BYTES)
        # Every eighth block is read again, so that evictions find what is worth keeping, more than they may keep.
        hot = np.arange(0, records.count, 8)
        for _ in range(rounds):
            put_all(tier, records)
            get_all(tier, records, hot)
        after = tier.health()[0].counts
        spent, useful = (after[name] - before[name] for name in ("written_bytes", "put_bytes"))
        return Result(
            name=self.name,
            value=spent / useful,
            unit="B/B",
            limit=1.0,
            spread=0.0,
            goal=AMPLIFICATION_GOAL,
            params={
                "what": "write amplification",
                "record_bytes": SMALL,
                "moved_bytes": after["moved_bytes"] - before["moved_bytes"],
                "evicted_segments": after["evicted_segments"] - before["evicted_segments"],
            },
        )


def open_tier(folder: Path) -> DiskTier:
    """A tier in a new folder. BenchmarkError: it cannot be had here."""
    folder.mkdir(mode=0o700)
    device = DiskFolder(path=folder, capacity_bytes=SEGMENTS * SEGMENT_BYTES)
    tier = DiskTier(DiskTerms(folders=[device], segment_bytes=SEGMENT_BYTES, record_limit_bytes=4 << 20))
    tier.wait_open(TIMEOUT_S)
    health = tier.health()[0]
    if health.state is not TierState.READY:
        tier.close()
        raise BenchmarkError(f"there is no disk tier here: {health.reason}", remedy="run in a folder with free space")
    return tier


def put_all(tier: DiskTier, records: Records) -> float:
    """Seconds until records of a new fingerprint are durable. Their digests are made before."""
    records.round += 1
    digests = records.digests()
    begun = time.perf_counter()
    order = np.arange(records.count)
    parts = [order[at : at + BATCH_RECORDS] for at in range(0, records.count, BATCH_RECORDS)]

    def submit(part: npt.NDArray[np.intp]) -> Ticket | None:
        return tier.put(
            records.names(part),
            records.slots(part),
            record_bytes=records.record_bytes,
            digests=digests[part],
            is_durable=True,
            timeout_s=TIMEOUT_S,
        )

    keep_going(tier, [partial(submit, order) for order in parts], RecordOutcome.DURABLE)
    return time.perf_counter() - begun


def get_all(tier: DiskTier, records: Records, order: npt.NDArray[np.intp]) -> float:
    """Seconds until these records were read to where they were put from."""
    parts = [order[at : at + BATCH_RECORDS] for at in range(0, len(order), BATCH_RECORDS)]
    begun = time.perf_counter()

    def submit(part: npt.NDArray[np.intp]) -> Ticket | None:
        return tier.get(
            records.names(part), records.slots(part), record_bytes=records.record_bytes, timeout_s=TIMEOUT_S
        )

    keep_going(tier, [partial(submit, part) for part in parts], RecordOutcome.FOUND)
    return time.perf_counter() - begun


def keep_going(tier: DiskTier, calls: list[Callable[[], Ticket | None]], wanted: RecordOutcome) -> None:
    """So many batches at once until all have ended. BenchmarkError: one ended in another way."""
    under_way = 0
    waiting = iter(calls)
    for call in waiting:
        call()
        under_way += 1
        if under_way == BATCHES_AT_ONCE:
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
