"""How close do saves and loads through the server's shared memory come to plain copies of the same bytes?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.units import MIB

if TYPE_CHECKING:
    from kvoffload.bench.record_mover import RecordMover

RECORD_BYTES = MIB
RECORDS = 64
"""Of a batch, and of a round of single ones."""
THREADS = 2
"""Threads that copy a batch."""
PAIRS = 15
MEMORY_MIB = 1024

_Move = Callable[[int], float]


class ShmBenchmark:
    """Saves: a slot that is held ready, the copy, publish. Loads: acquire, the copy, release. The limit is the copies
    alone, between the same memories, by as many threads. Records are other ones in every round, so the server evicts
    as it does in the long run."""

    name = "shm"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Records one by one, then in batches, each saved and loaded."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "server")
            # They bring ZeroMQ, which a command line need not wait for.
            from kvoffload.bench.record_mover import RecordMover
            from kvoffload.bench.served import PATIENT, join

            link = replace(PATIENT, stock_slots=(4 * RECORDS,))
            with (
                Child("kvoffload.bench.served", path, MEMORY_MIB, 0),
                join(path, "shm", record_bytes=RECORD_BYTES, link=link) as client,
                ThreadPoolExecutor(THREADS) as pool,
            ):
                mover = RecordMover(client, pool, records=RECORDS, record_bytes=RECORD_BYTES, threads=THREADS)
                for batch in (1, RECORDS):
                    for what, move in (("save", mover.save), ("load", mover.load)):
                        progress(f"{what}, {batch} at once")
                        yield self._measure(mover, what, move, batch)

    def _measure(self, mover: RecordMover, what: str, move: _Move, batch: int) -> Result:
        pair = measure_timed_pair(lambda: move(batch), lambda: mover.copy(what, batch), pairs=PAIRS)
        size = RECORDS * RECORD_BYTES
        single = Goal(Measure.VALUE, Bound.AT_LEAST, 5e9)
        return Result(
            name=self.name,
            value=size / pair.value_s,
            unit="B/s",
            limit=size / pair.limit_s,
            spread=pair.spread,
            goal=single if batch == 1 else Goal(Measure.RATIO, Bound.AT_LEAST, 0.85),
            params={
                "what": what,
                "record_bytes": RECORD_BYTES,
                "at_once": batch,
                "threads": 1 if batch == 1 else THREADS,
            },
        )
