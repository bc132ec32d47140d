"""How many more records does a disk hold if they are coded, and how much sooner do they come from it, or later?

Tiers that code never, always and as they see fit have a folder each. First each is given three times what it may hold,
on the slowest disk: `fits` is how many records were there at most, and how many times as many as uncoded. Then they
write the same records and read them again and again, in turn; medians. What a tier takes is compared with what the one
that never codes takes in the same turn: `read_gain` is the median of these ratios, 1.5 is one and a half times as fast.

The disk that FOLDER is on is read at rates of its own: the kernel limits the reads of a control group (version 1's
`blkio`, which needs root) in which this process is meanwhile. A limit holds over tenths of seconds, so what is read in
a turn takes at least a second. Then without a limit, and last a folder in memory, which is faster than decoding. The
limit is the rate. One JSON line for each.

Run: python -m benchmarks.coded_disk FOLDER RECORDS_FOLDER [MODEL_FOLDER], RECORDS_FOLDER as for `benchmarks/codec.py`
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.codec import read_records
from benchmarks.coded_wire import Wanted, compare, finish, take_turns
from benchmarks.kv_records import make_missing, parse_folders
from kvoffload.tiers.base import RecordOutcome, Ticket
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.disk import DiskFolder, DiskSettings, DiskTier
from kvoffload.tiers.record_coder import Coding
from kvoffload.units import MIB

RATES = (100, 300, 600)
"""MB/s."""
ROUNDS = 5
TURN_S = 1.0
MEMORY = Path("/dev/shm")
GROUPS = Path("/sys/fs/cgroup/blkio")
SEGMENT_BYTES = 8 * MIB
FILLED_BYTES = 512 * MIB


@contextmanager
def reading_at(rate: int, folder: Path) -> Iterator[None]:
    """Limits this process to so many MB/s of the folder's device meanwhile. OSError: it cannot be limited here."""
    number = folder.stat().st_dev
    group = GROUPS / f"kvoffload{os.getpid()}"
    group.mkdir()
    try:
        limit = f"{os.major(number)}:{os.minor(number)} {rate * 10**6}"
        (group / "blkio.throttle.read_bps_device").write_text(limit, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


@contextmanager
def open_tiers(folder: Path, capacity_bytes: int) -> Iterator[dict[Coding, DiskTier]]:
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        tiers: dict[Coding, DiskTier] = {}
        for coding in Coding:
            place = Path(parent, coding.value)
            place.mkdir(mode=0o700)
            folders = [DiskFolder(path=place, capacity_bytes=capacity_bytes)]
            tiers[coding] = DiskSettings(folders=folders, segment_bytes=SEGMENT_BYTES, compress=coding).open_tier()
            assert tiers[coding].wait_open(10.0)
        try:
            yield tiers
        finally:
            for tier in tiers.values():
                tier.close()


def coded_records(tier: DiskTier) -> int:
    return tier.health()[0].counts["coded_records"]


def write(tier: DiskTier, moved: Wanted) -> partial[Ticket | None]:
    """Writes all records. Returns what reads them."""
    names = moved.names()
    finish(tier, partial(tier.put, moved.batch(names)), RecordOutcome.WRITTEN)
    return partial(tier.get, names, moved.slots(moved.read), record_bytes=moved.record_bytes)


def count_fitting(
    records: Sequence[memoryview], folder: Path, *, capacity_bytes: int = FILLED_BYTES
) -> dict[str, dict[str, float]]:
    """Returns how many records were there at most for each coding while three times the disk was written."""
    moved = Wanted(records)
    found: dict[Coding, int] = {}
    with open_tiers(folder, capacity_bytes) as tiers:
        for coding, tier in tiers.items():
            for _ in range(-(-3 * capacity_bytes // moved.sent.nbytes)):
                finish(tier, write(tier, moved), RecordOutcome.FOUND)
                found[coding] = max(found.get(coding, 0), tier.health()[0].records)
    return {
        coding.value: {"records": count, "ratio": round(count / found[Coding.OFF], 3)}
        for coding, count in found.items()
    }


def measure(
    records: Sequence[memoryview], folder: Path, *, rounds: int = ROUNDS, turn_s: float = TURN_S
) -> dict[str, dict[str, float]]:
    """Returns for each coding the median milliseconds to read all records, how many times as fast as uncoded that was
    in the same turn, and the share coded."""
    moved = Wanted(records)
    times: Mapping[Coding, list[float]] = {coding: [] for coding in Coding}
    coded = dict.fromkeys(Coding, 0)
    warm = 2 * KNOWN_BYTES // moved.sent.nbytes + 2
    with open_tiers(folder, (warm + rounds + 2) * moved.sent.nbytes + 8 * SEGMENT_BYTES) as tiers:
        for at in range(warm + rounds):
            for coding, tier in take_turns(tiers, at):
                before = coded_records(tier)
                read = write(tier, moved)
                taken: list[float] = []
                while not taken or (at >= warm and sum(taken) < turn_s):
                    moved.read[:] = 0
                    taken.append(finish(tier, read, RecordOutcome.FOUND))
                    assert np.array_equal(moved.read, moved.sent)
                if at >= warm:
                    times[coding].append(statistics.mean(taken))
                    coded[coding] += coded_records(tier) - before
    return {
        coding.value: {
            "read_ms": round(1e3 * statistics.median(times[coding]), 2),
            "read_gain": compare(times[Coding.OFF], times[coding]),
            "coded": round(coded[coding] / (rounds * len(records)), 3),
        }
        for coding in Coding
    }


def main() -> None:
    given = parse_folders(__doc__, "folder")
    folder = given.folder
    make_missing(given.records, given.model)
    records = read_records(given.records, "text_bf16", sample_bytes=32 << 20)
    with reading_at(RATES[0], folder):
        print(json.dumps({"fits": count_fitting(records, folder), "capacity_bytes": FILLED_BYTES}), flush=True)
    for rate in (*RATES, None):
        with reading_at(rate, folder) if rate else nullcontext():
            found = measure(records, folder)
        print(
            json.dumps({"rate": f"{rate} MB/s" if rate else "no limit", "records": len(records), **found}), flush=True
        )
    print(json.dumps({"rate": "memory", "records": len(records), **measure(records, MEMORY)}), flush=True)


if __name__ == "__main__":
    main()
