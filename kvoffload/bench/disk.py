"""How close does the disk tier come to plain I/O on the same file system, how much does it write, and what do seals
cost?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.file_io import FileLoad, find_fio, time_file_load
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.bench.tier_load import BATCHES_AT_ONCE, TIMEOUT_S, Records, get_all, put_all
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import TierState
from kvoffload.tiers.disk import DiskFolder, DiskSettings, DiskTier

DATA_BYTES = 256 << 20
"""Bytes of one sample."""
SEGMENT_BYTES = 64 << 20
SEGMENTS = 12
LARGE, SMALL = 1 << 20, 64 << 10
DEPTH = 32
TURNOVERS = 3
"""How often the full disk is written over where write amplification is counted."""


def rate_goal(ratio: float) -> Goal:
    return Goal(Measure.RATIO, Bound.AT_LEAST, ratio)


AMPLIFICATION_GOAL = Goal(Measure.VALUE, Bound.AT_MOST, 1.2)


@dataclass(frozen=True)
class Places:
    """The tier that is measured, and the file of its limit."""

    tier: DiskTier
    limit: Path


class DiskBenchmark:
    """In a folder below the working one, which is gone afterwards: `cd` to the file system that is meant."""

    name = "disk"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second, compared with fio's or a plain loop's, of sealed records with unsealed ones'; and
        bytes written per byte put, at a full disk."""
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="kvoffload-bench-") as folder:
            tier = open_tier(Path(folder) / "tier")
            try:
                yield from self._rates(Places(tier, Path(folder) / "limit"), progress)
                progress("a full disk, written over and over")
                yield self._amplification(tier)
                progress("sealed records of 1 MiB, read")
                yield self._sealed(tier, Path(folder) / "sealed")
            finally:
                tier.close()

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

    def _sealed(self, tier: DiskTier, folder: Path) -> Result:
        memory = np.random.default_rng(6).integers(0, 256, DATA_BYTES, np.uint8)
        sides = [
            (side, Records(LARGE, DATA_BYTES // LARGE, memory, round=2 << 32))
            for side in (open_tier(folder, native.SealKeys([os.urandom(32)])), tier)
        ]
        try:
            for side, records in sides:
                put_all(side, records)
            order = np.arange(DATA_BYTES // LARGE)
            pair = measure_timed_pair(*(partial(get_all, side, records, order) for side, records in sides))
        finally:
            sides[0][0].close()
        return Result(
            name=self.name,
            value=DATA_BYTES / pair.value_s,
            unit="B/s",
            limit=DATA_BYTES / pair.limit_s,
            spread=pair.spread,
            goal=rate_goal(0.85),
            params={"what": "read, sealed", "record_bytes": LARGE, "limit_by": "unsealed records"},
        )


def open_tier(folder: Path, seal_keys: native.SealKeys | None = None) -> DiskTier:
    """A tier in a new folder. BenchmarkError: it cannot be had here."""
    folder.mkdir(mode=0o700)
    device = DiskFolder(path=folder, capacity_bytes=SEGMENTS * SEGMENT_BYTES)
    settings = DiskSettings(
        folders=[device], segment_bytes=SEGMENT_BYTES, record_limit_bytes=4 << 20, seal_keys=seal_keys
    )
    tier = DiskTier(settings)
    tier.wait_open(TIMEOUT_S)
    health = tier.health()[0]
    if health.state is not TierState.READY:
        tier.close()
        raise BenchmarkError(f"there is no disk tier here: {health.reason}", remedy="run in a folder with free space")
    return tier
