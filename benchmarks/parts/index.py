"""How close does the index come to reading the two cache lines that no look-up can do without?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.limits import limit_line_walk
from kvoffload.bench.measure import MIN_PAIRS, measure_timed_pair, summarize_pairs
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.errors import BenchmarkError
from kvoffload.units import format_size

ENTRIES = 1_000_000
MANY_ENTRIES = 20_000_000
ENTRY_BYTES = 300
"""Of memory for each: its record, all bookkeeping, and the lines of the limit."""
RECORD_BYTES = 64
"""Bytes of a record. They are never read."""
BATCH = 1000
PAIRS = 1001
BATCHES = 2
"""In a sample, which is short, and there are many: on a busy machine most of them then run undisturbed."""
ACQUIRE_BATCHES = 16
"""Acquire batches of a sample: enough for it to include its part of later costs, as the policy is told about every 16th
call."""
ACQUIRE_TRIES = 100
STORE_BATCHES = 1
SHORT_BLOCKS = 64
RACE_CALLS = 10_000
LEAST_HITS = 0.5
"""Least share of hits among acquires that run during stores. Acquires that find less are shorter, and do not count."""
GROWN_ENTRIES = 4_000_000
GROWN_FROM = ENTRIES
GROWTH_STEP = 20_000
LEAST_ENTRY_BYTES = 64 + 8 + 64 / 11
"""Bytes that the format needs at least: an entry, its digest, and its place in a full bucket."""


class IndexBenchmark:
    """All loops are native and time themselves. Hashes are random, and present where they are looked up."""

    name = "index"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Look-ups, acquires and stores with a million entries, memory while growing, look-ups with many entries."""
        walk = native.LineWalk(ENTRIES)
        for policy in dict.fromkeys((DEFAULT_POLICY, "lru")):
            progress(f"{ENTRIES:,} entries, policy {policy}")
            load = _fill(ENTRIES, policy)
            if policy == DEFAULT_POLICY:
                yield self._look_up(load, walk, ENTRIES, 25e6)
                yield self._acquire(load, walk)
            progress(f"stores that evict, policy {policy}")
            yield self._store(load, walk, policy)
            if policy == DEFAULT_POLICY:
                progress("acquires beside stores")
                yield from self.race(load, walk)
                progress("stores after acquires")
                yield self._store(load, walk, policy, acquires=True)
        del load, walk
        progress(f"growing to {GROWN_ENTRIES:,} entries")
        yield self._grow()
        progress(f"{MANY_ENTRIES:,} entries")
        yield self._look_up(_fill(MANY_ENTRIES, DEFAULT_POLICY), native.LineWalk(MANY_ENTRIES), MANY_ENTRIES, 10e6)

    def _look_up(self, load: native.CacheLoad, walk: native.LineWalk, entries: int, goal: float) -> Result:
        return self._compare(
            lambda: load.look_up(BATCHES),
            walk,
            amount=BATCHES * BATCH,
            unit="look-ups/s",
            goal=Goal(Measure.VALUE, Bound.AT_LEAST, goal),
            params={"what": "look-up", "batch": BATCH, "entries": entries},
        )

    def _acquire(self, load: native.CacheLoad, walk: native.LineWalk) -> Result:
        return self._compare(
            lambda: load.acquire(ACQUIRE_BATCHES, BATCH),
            walk,
            amount=ACQUIRE_BATCHES * BATCH,
            counts_up=True,
            unit="blocks/s",
            goal=Goal(Measure.VALUE, Bound.AT_LEAST, 8e6),
            params={"what": "acquire", "batch": BATCH, "entries": ENTRIES},
        )

    def _store(self, load: native.CacheLoad, walk: native.LineWalk, policy: str, *, acquires: bool = False) -> Result:
        """A record's limit is two walks: one for it, and one for the record that it evicts.

        With `acquires` as many blocks are acquired before each sample, and the policy hears of them in its time.
        """
        check_done(load.store(2 * ENTRIES), 2 * ENTRIES)
        _, evicted_before, _ = load.counts()
        amount = STORE_BATCHES * BATCH

        def store() -> tuple[float, int]:
            if acquires:
                acquire_some(load, amount)
            return load.store(amount)

        what = "reserve, commit, evict"
        result = self._compare(
            store,
            walk,
            amount=amount,
            walks=2,
            counts_up=True,
            unit="records/s",
            goal=Goal(Measure.VALUE, Bound.AT_LEAST, 2e6) if policy == DEFAULT_POLICY and not acquires else None,
            params={
                "what": f"{what}, after acquires" if acquires else what,
                "policy": policy,
                "batch": BATCH,
                "entries": ENTRIES,
            },
        )
        _, evicted, _ = load.counts()
        if evicted - evicted_before != (PAIRS + 1) * amount:
            raise BenchmarkError(f"{evicted - evicted_before} records were evicted, not one for each that was stored")
        return result

    def _compare(
        self,
        value: Callable[[], tuple[float, int]],
        walk: native.LineWalk,
        *,
        amount: int,
        walks: int = 1,
        counts_up: bool = False,
        unit: str,
        goal: Goal | None,
        params: Mapping[str, int | float | str],
    ) -> Result:
        batches = walks * amount // BATCH
        limit = limit_line_walk(walk, batches=batches, hashes=BATCH, amount=amount, counts_up=counts_up)
        pair = measure_timed_pair(
            lambda: check_done(value(), amount), lambda: walk.walk(batches, BATCH, counts_up)[0], pairs=PAIRS
        )
        return Result(
            name=self.name,
            value=amount / pair.value_s,
            unit=unit,
            limit=limit.rate(pair.limit_s),
            spread=pair.spread,
            goal=goal,
            params=params,
        )

    def race(self, load: native.CacheLoad, walk: native.LineWalk) -> Iterator[Result]:
        """Times acquires while another thread stores. The limit walks as many lines, during the same stores."""
        values, limits, hits, stored = [], [], 0, 0
        for _ in range(MIN_PAIRS):
            seconds, stored_meanwhile = load.race_acquires(RACE_CALLS, SHORT_BLOCKS)
            values.append(np.frombuffer(seconds, np.float64) * 1e6)
            hits += len(values[-1])
            stored += stored_meanwhile
            limits.append(np.frombuffer(load.race_walks(RACE_CALLS, SHORT_BLOCKS, walk)[0], np.float64) * 1e6)
        if hits < MIN_PAIRS * RACE_CALLS * LEAST_HITS:
            raise BenchmarkError(
                f"{hits} of {MIN_PAIRS * RACE_CALLS} acquires were hits: the stores evict them too fast"
            )
        for percentile, goal in ((50, None), (99, Goal(Measure.VALUE, Bound.AT_MOST, 50))):
            pair = summarize_pairs(
                [float(np.percentile(sample, percentile)) for sample in values],
                [float(np.percentile(sample, percentile)) for sample in limits],
            )
            yield Result(
                name=self.name,
                value=pair.value_s,
                unit="us",
                limit=pair.limit_s,
                spread=pair.spread,
                goal=goal,
                params={
                    "what": "acquire beside stores",
                    "percentile": percentile,
                    "batch": SHORT_BLOCKS,
                    "hits": hits,
                    "calls": MIN_PAIRS * RACE_CALLS,
                    "stored": stored,
                    "processors": os.cpu_count() or 1,
                },
            )

    def _grow(self) -> Result:
        _check_memory(GROWN_ENTRIES * ENTRY_BYTES)
        steps = native.measure_growth(
            entries=GROWN_ENTRIES, record_bytes=RECORD_BYTES, policy=DEFAULT_POLICY, threads=2, step=GROWTH_STEP
        )
        entries, index_bytes, private_bytes = max(
            (step for step in steps if step[0] >= GROWN_FROM), key=lambda step: (step[1] + step[2]) / step[0]
        )
        last_entries, *last_bytes = steps[-1]
        return Result(
            name=self.name,
            value=(index_bytes + private_bytes) / entries,
            unit="B/entry",
            limit=LEAST_ENTRY_BYTES,
            spread=0.0,
            goal=Goal(Measure.VALUE, Bound.AT_MOST, 128),
            params={
                "what": "peak memory while growing",
                "policy": DEFAULT_POLICY,
                "from_entries": GROWN_FROM,
                "at_entries": entries,
                "index": round(index_bytes / entries, 1),
                "private": round(private_bytes / entries, 1),
                "entries": last_entries,
                "at_the_end": round(sum(last_bytes) / last_entries, 1),
            },
        )


def _fill(entries: int, policy: str) -> native.CacheLoad:
    _check_memory(entries * ENTRY_BYTES)
    load = native.make_cache_load(entries=entries, record_bytes=RECORD_BYTES, policy=policy, threads=2)
    check_done(load.store(entries), entries)
    return load


def acquire_some(load: native.CacheLoad, blocks: int) -> None:
    """Acquires at least so many blocks. Chains that were evicted, or their ends, are not there, so others are drawn."""
    for _ in range(ACQUIRE_TRIES):
        blocks -= load.acquire(1, BATCH)[1]
        if blocks <= 0:
            return
    raise BenchmarkError(f"{ACQUIRE_TRIES} chains had {blocks} blocks too few: the stores evict them too fast")


def check_done(timing: tuple[float, int], wanted: int) -> float:
    """Returns the seconds. BenchmarkError: not all was done, and half the work in half the time is no gain."""
    seconds, done = timing
    if done != wanted:
        raise BenchmarkError(f"{done} of {wanted} operations did what they should")
    return seconds


def _check_memory(needed_bytes: int) -> None:
    headroom = native.memory_headroom_bytes()
    if headroom < needed_bytes:
        raise BenchmarkError(
            f"{format_size(needed_bytes)} of memory are needed, {format_size(headroom)} are there",
            remedy="run on a machine with more memory",
        )
