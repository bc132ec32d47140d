"""How close does the record digest come to reading the same bytes once?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.limits import limit_read
from kvoffload.bench.measure import measure_pair
from kvoffload.types import HASH_BYTES

RECORD_BYTES = (4 << 10, 64 << 10, 1 << 20)
GOALS = {1 << 20: Goal(Measure.RATIO, Bound.AT_LEAST, 0.8)}
MEMORY_BYTES = 512 << 20
"""Far more than any processor's cache: what a tier hands over has not been touched for a while."""
CACHE_BYTES = 1 << 20
"""Size of records that fit into a processor's cache, where those lie that a copy engine has just moved."""


class DigestBenchmark:
    """Records in a row, each digested under a hash of its own. The limit reads the same bytes by the widest loads."""

    name = "digest"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """A line per record size in memory, then in cache, in bytes per second. The goals are about memory."""
        memory = np.random.default_rng(1).integers(0, 2**64 - 1, MEMORY_BYTES // 8, dtype=np.uint64)
        for place, working_set in (("memory", memory), ("cache", memory[: CACHE_BYTES // 8])):
            for record_bytes in RECORD_BYTES:
                progress(f"records of {record_bytes} bytes in {place}")
                yield self._measure(working_set, record_bytes, place)

    def _measure(self, records: npt.NDArray[np.uint64], record_bytes: int, place: str) -> Result:
        hashes = np.random.default_rng(2).bytes(records.nbytes // record_bytes * HASH_BYTES)

        def digest() -> bytes:
            return native.digest_records(
                records.data, record_bytes, fingerprint=bytes(HASH_BYTES), block_hashes=hashes, group=0, shard=0
            )

        limit = limit_read(records)
        pair = measure_pair(digest, limit.call)
        return Result(
            name=self.name,
            value=records.nbytes / pair.value_s,
            unit="B/s",
            limit=limit.rate(pair.limit_s),
            spread=pair.spread,
            goal=GOALS.get(record_bytes) if place == "memory" else None,
            params={"record_bytes": record_bytes, "place": place, "path": native.digest_path()},
        )
