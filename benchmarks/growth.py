"""Measures how the cost of an operation grows with entries, the size of the pool, engines and tenants.

Native loads of a cache whose records have no memory (only the index is real): look-ups, acquires of 256 blocks that hit
and that miss, and stores that evict. A load of a small size and one of a larger size are measured in turns, and with
each of them bare reads of two cache lines of its own index at random, which no table of that size can do without. Then
the same memory is adopted, and real servers are started and asked by as many clients. Times are lower quartiles, those
of making and adopting a cache are the processor's. Prints one JSON line a size.
Run: python -m benchmarks.growth --picture docs/pictures/growth.svg
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ground.server import run_server
from kvoffload import native
from kvoffload.bench.served import acquire, join, make_chain, save_chain
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.cli.line_chart import draw_amounts
from kvoffload.client import Client
from kvoffload.errors import BenchmarkError
from kvoffload.units import GIB, MIB

ENTRIES = (1_000_000, 4_000_000, 16_000_000, 50_000_000)
POOLS_GIB = (16, 256, 2048)
COUNTS = (1, 8, 64)
"""So many engines, and so many tenants, are compared."""
BLOCKS = 256
CHAINS = 16
"""Acquired in a sample: the policy hears of acquires now and then, and each sample has its part of that."""
BATCH = 1000
TURNS = 31
MOST_SPARE = 200_000
"""Stored beyond what there is room for, so that each store evicts from then on."""
SEGMENT_BYTES = 4 * GIB
FLAT = 1.2
"""The goal: no operation costs more of a larger size than so many times that of the smallest."""
WALK = "two cache lines"
CLIENT_TURNS = 300


@dataclass(frozen=True)
class Size:
    """How large a cache is, and by how many it is used."""

    entries: int
    pool_bytes: int
    engines: int = 1
    tenants: int = 1

    @property
    def record_bytes(self) -> int:
        """Returns the size of records that fill the pool: a power of two, so that none of it is left over."""
        return 1 << ((self.pool_bytes // self.entries).bit_length() - 1)


@dataclass(frozen=True)
class Load:
    """A full cache of a size, and what it took to make it."""

    size: Size
    load: native.CacheLoad
    start_s: float
    index_bytes: int
    private_bytes: int

    def sample(self) -> dict[str, float]:
        """Nanoseconds of one operation each."""
        timed: dict[str, Callable[[], tuple[float, int]]] = {
            "look-up": lambda: self.load.look_up(2),
            f"hit of {BLOCKS}": lambda: self.load.acquire(CHAINS, BLOCKS),
            f"miss of {BLOCKS}": lambda: self.load.acquire_missing(CHAINS, BLOCKS),
            "store": lambda: self.load.store(BATCH),
            WALK: lambda: self.load.walk(2),
        }
        found = {}
        for name, call in timed.items():
            seconds, done = call()
            if done == 0:
                raise BenchmarkError(f"{name}: nothing was done with {self.size}")
            found[name] = seconds / done * 1e9
        return found


def fill(size: Size) -> Load:
    """Makes a cache of this size and fills it, until each store evicts."""
    before = _read_private_bytes()
    begun_s = time.process_time()
    load = native.make_sparse_load(
        entries=size.entries,
        record_bytes=size.record_bytes,
        policy=DEFAULT_POLICY,
        segment_bytes=SEGMENT_BYTES,
        sessions=size.engines,
        tenants=size.tenants,
    )
    start_s = time.process_time() - begun_s
    load.store(size.pool_bytes // size.record_bytes + min(size.entries // 4, MOST_SPARE))
    if load.counts()[1] == 0:
        raise BenchmarkError(f"nothing is evicted with {size}")
    return Load(size, load, start_s, load.index_bytes(), max(_read_private_bytes() - before, 0))


def compare(base: Load, other: Load, turns: int) -> dict[str, Any]:
    """Nanoseconds of each operation, and how many times those of the base, in turns."""
    samples = [(base.sample(), other.sample()) for _ in range(turns)]
    found = {}
    for name in samples[0][0]:
        ours, others = (_undisturbed([pair[at][name] for pair in samples]) for at in (0, 1))
        found[name] = {"ns": round(others, 1), "times": round(others / ours, 3)}
    return found


def measure_sizes(what: str, sizes: Sequence[Size], *, turns: int, adopts: bool) -> Iterator[dict[str, Any]]:
    """Makes a row for each size; the first is measured in turn with another of its own size."""
    base = fill(sizes[0])
    for size in sizes:
        other = fill(size)
        row = {
            "what": what,
            "entries": other.load.counts()[0],
            "pool_gib": size.pool_bytes // GIB,
            "engines": size.engines,
            "tenants": size.tenants,
            "operations": compare(base, other, turns),
            "index_bytes_an_entry": round(other.index_bytes / size.entries, 1),
            "private_bytes_an_entry": round(other.private_bytes / size.entries, 1),
            "memory_per_mille": round((other.index_bytes + other.private_bytes) / size.pool_bytes * 1000, 3),
            "start_s": round(other.start_s, 3),
        }
        if adopts:
            begun_s = time.process_time()
            other.load.adopt()
            row["adoption_s"] = round(time.process_time() - begun_s, 3)
        yield row
        del other


def measure_clients(turns: int) -> Iterator[dict[str, Any]]:
    """Acquires over an express channel by the first of so many clients, and by all of them one after the other, each
    in turn with the same acquires of the only client of another server."""
    chain = make_chain(BLOCKS)
    with ExitStack() as stack:
        served = {count: _open_clients(stack, count) for count in COUNTS}
        alone = served[COUNTS[0]][0]
        save_chain(alone, chain)
        for clients in (served[count] for count in COUNTS[1:]):
            save_chain(clients[0], chain)
        for count, clients in served.items():
            firsts, each, limits = [], [], []
            for turn in range(turns):
                limits.append(_time_acquire(alone, chain))
                firsts.append(_time_acquire(clients[0], chain))
                each.append(_time_acquire(clients[turn % count], chain))
            limit = _undisturbed(limits)
            yield {
                "what": "clients",
                "engines": count,
                "acquire_us": round(_undisturbed(firsts) * 1e6, 1),
                "times": round(_undisturbed(firsts) / limit, 3),
                "in_turn_times": round(_undisturbed(each) / limit, 3),
            }


def measure_starts(turns: int) -> Iterator[dict[str, Any]]:
    """Measures the time from `kvoffload serve` to the first hit of a block, with pools of all sizes in turn."""
    taken: dict[int, list[float]] = {pool: [] for pool in POOLS_GIB}
    for turn in range(turns):
        for pool, seconds in taken.items():
            seconds.append(_time_start(pool, make_chain(1, seed=turn)))
    for pool, seconds in taken.items():
        yield {"what": "start", "pool_gib": pool, "seconds": round(statistics.median(seconds), 2)}


def measure(*, entries: Sequence[int], turns: int, starts: int) -> Iterator[dict[str, Any]]:
    """All rows, of entries up to the last of these."""
    size = Size(entries[0], POOLS_GIB[-1] * GIB)
    yield from measure_sizes("entries", [replace(size, entries=count) for count in entries], turns=turns, adopts=True)
    pools = [replace(size, pool_bytes=pool * GIB) for pool in POOLS_GIB]
    yield from measure_sizes("pool", pools, turns=turns, adopts=False)
    size = pools[1]
    engines = [replace(size, engines=count) for count in COUNTS]
    yield from measure_sizes("engines", engines, turns=turns, adopts=False)
    tenants = [replace(size, tenants=count) for count in COUNTS]
    yield from measure_sizes("tenants", tenants, turns=turns, adopts=False)
    if starts:
        yield from measure_clients(CLIENT_TURNS)
        yield from measure_starts(starts)


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws what a block costs in each operation that reads, over the number of entries."""
    found = [row for row in rows if row["what"] == "entries"]
    blocks = {"look-up": 1, f"hit of {BLOCKS}": 1, f"miss of {BLOCKS}": BLOCKS, WALK: 1}
    lines = {
        name: [(row["entries"] / 1e6, row["operations"][name]["ns"] / count) for row in found]
        for name, count in blocks.items()
    }
    return draw_amounts(
        "Nanoseconds for each block, by millions of entries",
        "dashed: bare reads of two cache lines of the same index at random",
        lines,
        name_size=lambda millions: f"{millions:.0f}",
        dashed=WALK,
    )


def _undisturbed(samples: Sequence[float]) -> float:
    """Returns the lower quartile: what else the machine does only adds."""
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


def _read_private_bytes() -> int:
    """Returns what this process has that is resident and of no file; shared memory counts as a file."""
    # Memory that was freed before would be taken again without being seen.
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def _open_clients(stack: ExitStack, count: int) -> list[Client]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    socket = stack.enter_context(run_server(folder, memory=str(GIB)))
    return [stack.enter_context(join(socket, f"engine{number}", record_bytes=MIB // 16)) for number in range(count)]


def _time_acquire(client: Client, chain: bytes) -> float:
    begun_s = time.perf_counter()
    found = acquire(client, chain)
    taken_s = time.perf_counter() - begun_s
    assert found.lease is not None
    client.release(found.lease)
    return taken_s


def _time_start(pool_gib: int, chain: bytes) -> float:
    begun_s = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as name,
        run_server(Path(name), memory=str(pool_gib * GIB)) as socket,
        join(socket, "first", record_bytes=MIB) as client,
    ):
        save_chain(client, chain)
        acquire(client, chain)
        return time.perf_counter() - begun_s


def main() -> int:
    parser = argparse.ArgumentParser(description="How cost grows with entries, pools, engines and tenants.")
    parser.add_argument("--entries", default=",".join(map(str, ENTRIES)), help="sizes, the smallest first")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--starts", type=int, default=3, help="of each server; 0: no servers and no clients")
    parser.add_argument("--picture", type=Path, help="an SVG file that is written")
    options = parser.parse_args()
    entries = [int(count) for count in options.entries.split(",")]
    rows = []
    for row in measure(entries=entries, turns=options.turns, starts=options.starts):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.picture is not None:
        options.picture.write_text(draw(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
