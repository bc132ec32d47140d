"""What does an engine notice of its server's disk? Measured with a disk that is saturated while the engine saves, and
with blocks that are promoted for other engines while it hits."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.parts.promoter import HIT_BLOCKS, HIT_RECORD_BYTES, PROMOTIONS, start_promoter
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.measure import measure_timed_pair, summarize_pairs
from kvoffload.bench.record_mover import RecordMover
from kvoffload.bench.served import PATIENT, acquire, join, make_chain, save_chain
from kvoffload.client import Client
from kvoffload.errors import BenchmarkError
from kvoffload.units import MIB

MEMORY_MIB = 512
POLICY = "lru"
"""The policy under which saved records stay until they are the oldest; the default one tries out other victims."""
DISK_MIB = 4096
RECORDS = 32
"""Of 1 MiB, in a sample of saves."""
FILLING_SAVES = 4
"""Before each sample: the disk has work for longer than that takes."""
PAIRS = 31
HIT_CALLS = 500
HIT_ROUNDS = 7
COLD_CHAINS = 160
"""Of `HIT_BLOCKS` each: more than memory has room for, so that they come up again and again."""
SAVE_GOAL = Goal(Measure.RATIO, Bound.AT_LEAST, 0.98)
HIT_GOAL = Goal(Measure.VALUE, Bound.AT_MOST, 1.0)
WAIT_S = 300.0
"""For what a busy machine does late, and a disk that is full never."""


class TieredBenchmark:
    """In a folder below the working one, which is gone afterwards."""

    name = "tiered"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Saves and hits; the limit is a server without a disk, or without promotions."""
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="kvoffload-bench-") as folder:
            progress("saves while the disk has more to write than it can")
            yield _measure_saves(self.name, Path(folder))
            progress(f"hits while {PROMOTIONS} requests wait for the disk")
            yield _measure_hits(self.name, Path(folder))


def _measure_saves(name: str, folder: Path) -> Result:
    size = RECORDS * MIB
    link = replace(PATIENT, stock_slots=(4 * RECORDS,))
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        movers: list[RecordMover] = []
        for disk in ((), (_make_folder(folder / "saves"), DISK_MIB)):
            path = folder / f"socket{len(movers)}"
            stack.enter_context(Child("kvoffload.bench.served", path, MEMORY_MIB, 0, POLICY, *disk))
            client = stack.enter_context(join(path, "saves", record_bytes=MIB, link=link))
            movers.append(RecordMover(client, pool, records=RECORDS, record_bytes=MIB, threads=1))
        plain, tiered = movers
        _await_open(client)

        def save_down() -> float:
            for _ in range(FILLING_SAVES):
                tiered.save(1)
            return tiered.save(1)

        pair = measure_timed_pair(save_down, lambda: plain.save(1), pairs=PAIRS)
        waiting_bytes = client.stats().traffic["disk"]["waiting_bytes"]
        _await_written(client)
        written = client.stats().traffic["disk"]
    return Result(
        name=name,
        value=size / pair.value_s,
        unit="B/s",
        limit=size / pair.limit_s,
        spread=pair.spread,
        goal=SAVE_GOAL,
        params={
            "what": "save, disk saturated",
            "record_bytes": MIB,
            "waiting_bytes": waiting_bytes,
            "written": written["written"],
            "dropped": written["dropped_full"] + written["dropped_gone"],
        },
    )


def _measure_hits(name: str, folder: Path) -> Result:
    path, disk = folder / "socket", _make_folder(folder / "hits")
    with (
        Child("kvoffload.bench.served", path, MEMORY_MIB, 0, POLICY, disk, DISK_MIB),
        join(path, "hits", record_bytes=HIT_RECORD_BYTES) as client,
    ):
        _await_open(client)
        for seed in range(COLD_CHAINS):
            save_chain(client, make_chain(HIT_BLOCKS, 1000 + seed))
            _await_written(client)
        hot = make_chain(HIT_BLOCKS)
        save_chain(client, hot)
        _await_written(client)
        # Without a lease, the records that come up between two hits might push the blocks out.
        held = acquire(client, hot)
        assert held.lease is not None
        beside, alone = [], []
        for _ in range(HIT_ROUNDS):
            alone.append(_find_p99(client, hot))
            before = _count_promoted(client)
            with start_promoter(path, COLD_CHAINS):
                _await_promoted(client, before)
                beside.append(_find_p99(client, hot))
        client.release(held.lease)
        pair = summarize_pairs(beside, alone)
        promoted = _count_promoted(client)
    added = statistics.median(beside) - statistics.median(alone)
    return Result(
        name=name,
        value=added * 1e3,
        unit="ms added",
        limit=pair.limit_s * 1e3,
        spread=pair.spread,
        goal=HIT_GOAL,
        params={"what": "memory hit, p99, beside promotions", "promotions": PROMOTIONS, "promoted": promoted},
    )


def _find_p99(client: Client, chain: bytes) -> float:
    seconds = []
    for _ in range(HIT_CALLS):
        start = time.perf_counter()
        found = acquire(client, chain)
        seconds.append(time.perf_counter() - start)
        assert found.lease is not None
        client.release(found.lease)
    return statistics.quantiles(seconds, n=100)[98]


def _count_promoted(client: Client) -> int:
    return client.stats().traffic["disk"]["promoted"]


def _await_promoted(client: Client, before: int) -> None:
    """Returns when more blocks have come up than there were before. BenchmarkError: none does."""
    end_s = time.monotonic() + WAIT_S
    while _count_promoted(client) <= before:
        if time.monotonic() > end_s:
            raise BenchmarkError("nothing came up from the disk")
        time.sleep(0.001)


def _await_open(client: Client) -> None:
    """Waits until the disk is open: what is saved before is never written. BenchmarkError: it does not open."""
    end_s = time.monotonic() + WAIT_S
    while any(place.state != "ready" for place in client.stats().places):
        if time.monotonic() > end_s:
            raise BenchmarkError("the disk tier does not open", remedy="see what the server says above")
        time.sleep(0.001)


def _await_written(client: Client) -> None:
    """Waits until all is written. BenchmarkError: the disk does not take what it is given."""
    end_s = time.monotonic() + WAIT_S
    while client.stats().traffic["disk"]["waiting_bytes"]:
        if time.monotonic() > end_s:
            raise BenchmarkError("the disk tier does not write", remedy="run in a folder with free space")
        time.sleep(0.001)


def _make_folder(folder: Path) -> str:
    folder.mkdir(mode=0o700)
    return str(folder)
