"""How exact is what a pool says of less and more memory?

Serves traces with a pool of the real cache, asks it what a quarter to four times its memory would have hit, and replays
the trace at each of these sizes. Prints both as shares of blocks in per cent, and by how much they differ. With --worth
it prints by how much the seconds of prefill that are told for half to twice the memory differ from those of replays,
and by how much they may, in per cent of the replay's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.eviction import list_traces
from benchmarks.evictions.traces import Request, Trace
from kvoffload import native
from kvoffload.cache import Ask, CacheGeometry, CacheGroup, CacheSettings, GroupRule, LocalCache
from kvoffload.cache.replay import pack_trace
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest
from kvoffload.client.insight import HitWindow as Window
from kvoffload.client.insight import ServerInsight
from kvoffload.kvspec import ReuseRule
from kvoffload.server.operators.hit_window import HitSums, HitWindow
from kvoffload.top.memory_worth import MEMORIES, MemoryWorth, find_worth
from kvoffload.types import HASH_BYTES
from kvoffload.units import KIB

PERCENTS = (2.5, 5.0, 10.0)
UNIT_BYTES = 256
"""A block of attention alone has one unit in `kvoffload replay`, and a hybrid's blocks have 4, 2 and 16."""
TOKEN_US = 21.6
"""Microseconds that computing a token takes, as `kvoffload replay` has it. Engines tell the same for each token."""
SECOND_NS = 1_000_000_000
STATE_BLOCKS = 8
WINDOW_BLOCKS = 4
NO_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """One pool and one trace: shares in per cent by memory."""

    trace: str
    is_hybrid: bool
    percent: float
    one_in: int
    told: dict[float, float]
    replayed: dict[float, float]
    worth: MemoryWorth
    own_s: float
    """Seconds of prefill that the pool's own hits saved."""
    saved_s: dict[float, float]
    """Seconds of prefill that the hits of replays saved, by memory."""

    @property
    def worth_errors(self) -> dict[float, tuple[float, float]]:
        """Returns, for each size, by how much the told seconds differ from the replay's, and by how much they may, both
        in per cent of the replay's."""
        return {
            one.memory: (
                100 * (self.own_s + one.saved_s - self.saved_s[one.memory]) / self.saved_s[one.memory],
                100 * one.error_s / self.saved_s[one.memory],
            )
            for one in self.worth.sizes
        }

    @property
    def errors(self) -> dict[float, float]:
        """Returns the curve's error in points for each size of memory."""
        return {memory: self.told[memory] - self.replayed[memory] for memory in self.told}


def make_geometry(*, is_hybrid: bool) -> CacheGeometry:
    def group(reuse: ReuseRule, units: int, *, blocks: int = 1, window: int = 0) -> CacheGroup:
        rule = GroupRule(block_size=blocks * BLOCK_TOKENS, reuse=reuse, window=window * BLOCK_TOKENS)
        return CacheGroup(rule=rule, record_bytes=units * UNIT_BYTES)

    if not is_hybrid:
        return CacheGeometry(hash_block_size=BLOCK_TOKENS, groups=(group(ReuseRule.PREFIX, 1),))
    return CacheGeometry(
        hash_block_size=BLOCK_TOKENS,
        groups=(
            group(ReuseRule.PREFIX, 4),
            group(ReuseRule.WINDOW, 2, window=WINDOW_BLOCKS),
            group(ReuseRule.EXACT_BOUNDARY, 16, blocks=STATE_BLOCKS),
        ),
    )


class ServedPool:
    """A pool of the real cache that serves requests one after the other, each saving what it did not find."""

    def __init__(self, size_bytes: int, *, is_hybrid: bool) -> None:
        extent = 64 * KIB
        rounded = max(size_bytes // extent, 1) * extent
        self.cache = LocalCache.create(
            CacheSettings(memory_bytes=rounded, segment_bytes=rounded, extent_bytes=extent, entry_limit=1 << 20)
        )
        self._geometry = make_geometry(is_hybrid=is_hybrid)
        self._alignment = (STATE_BLOCKS if is_hybrid else 1) * BLOCK_TOKENS
        self._name_space = self.cache.open_namespace(hashlib.sha256(b"a model").digest(), self._geometry)
        self._session = self.cache.open_session()
        self._names: dict[int, bytes] = {}
        self._window = HitWindow()
        self._requests = 0
        self._asked_blocks = 0
        self._hit_tokens = 0
        self._note()

    def serve(self, request: Request) -> None:
        names = [self._names.setdefault(block, hashlib.sha256(block.to_bytes(8)).digest()) for block in request]
        found = self.cache.acquire(self._session, self._name_space, Ask(b"".join(names), alignment=self._alignment))
        for group in range(len(self._geometry.groups)):
            self._save(group, names, found.boundary // BLOCK_TOKENS)
        if found.lease:
            self.cache.release(self._session, found.lease)
        self._requests += 1
        self._asked_blocks += len(names)
        self._hit_tokens += found.boundary
        self._note()

    def _save(self, group: int, names: list[bytes], begin: int) -> None:
        step = self._geometry.groups[group].rule.block_size // BLOCK_TOKENS
        places = range(begin + step - 1, len(names), step)
        hashes = b"".join(names[at] for at in places)
        if not hashes:
            return
        room = self.cache.reserve(self._session, self._name_space, group, hashes=hashes)
        taken = [at for at, ticket in zip(places, room.tickets, strict=False) if ticket]
        if not taken:
            return
        parents = (names[at] if group else (names[at - 1] if at else NO_PARENT) for at in taken)
        self.cache.commit(
            self._session,
            self._name_space,
            group,
            room.tickets[room.tickets != 0],
            hashes=b"".join(names[at] for at in taken),
            parents=b"".join(parents),
            digests=np.ones(len(taken), np.uint64),
        )

    def _note(self) -> None:
        prompts = HitSums(saved_us=round(self.saved_s * 1e6), hit_memory=self._hit_tokens)
        self._window.look(self._requests * SECOND_NS, self.cache.memory_curve, prompts)

    @property
    def saved_s(self) -> float:
        """Seconds of prefill that hits have saved."""
        return self._hit_tokens * TOKEN_US / 1e6

    @property
    def rates(self) -> dict[float, float]:
        sums, points = self._window.sums, self.cache.memory_curve.points
        return {
            point.memory: 100 * hits / max(sums.asked_blocks, 1)
            for point, hits in zip(points, sums.hit_blocks, strict=True)
        }

    @property
    def worth(self) -> MemoryWorth:
        sums, curve = self._window.sums, self.cache.memory_curve
        insight = ServerInsight(
            outcomes={},
            errors={},
            timings=(),
            asked_blocks=self._asked_blocks,
            distinct_blocks=len(self._names),
            saved_s=self.saved_s,
            curve=curve,
            window=Window(
                span_s=self._window.span_s,
                saved_s=sums.saved_us / 1e6,
                hit_memory=sums.hit_memory,
                asked_blocks=sums.asked_blocks,
                has_other_groups=len(self._geometry.groups) > 1,
                hit_blocks={one.memory: hits for one, hits in zip(curve.points, sums.hit_blocks, strict=True)},
            ),
        )
        return find_worth(self.cache.stats, insight)


def measure(name: str, requests: Trace, *, percent: float, is_hybrid: bool) -> Exactness:
    packed = pack_trace(
        TraceRequest(timestamp_ms=0, input_length=BLOCK_TOKENS * len(blocks), output_length=0, hash_ids=blocks)
        for blocks in requests
    )
    pool = ServedPool(int(packed.total_bytes(is_hybrid) * percent / 100) * UNIT_BYTES, is_hybrid=is_hybrid)
    for request in requests:
        pool.serve(request)
    units = pool.cache.capacity_bytes // UNIT_BYTES
    told, worth = pool.rates, pool.worth
    hits = {
        memory: native.replay_policy(packed, DEFAULT_POLICY, int(units * memory), is_hybrid)["hits"]
        for memory in {*told, *MEMORIES}
    }
    return Exactness(
        trace=name,
        is_hybrid=is_hybrid,
        percent=percent,
        one_in=pool.cache.memory_curve.one_in,
        told=told,
        replayed={memory: 100 * hits[memory] / packed.reference_count for memory in told},
        worth=worth,
        own_s=pool.saved_s,
        saved_s={memory: hits[memory] * BLOCK_TOKENS * TOKEN_US / 1e6 for memory in MEMORIES},
    )


def _measure_all(options: argparse.Namespace) -> Iterator[Exactness]:
    for name, requests in list_traces(options.trace, seed=options.seed):
        if options.only and name not in options.only:
            continue
        for is_hybrid in (False, True) if options.hybrid else (False,):
            for percent in options.percent or PERCENTS:
                yield measure(name, requests, percent=percent, is_hybrid=is_hybrid)


def _as_json(found: Exactness) -> str:
    return json.dumps(
        {
            "trace": found.trace,
            "model": "hybrid" if found.is_hybrid else "plain",
            "capacity_percent": found.percent,
            "one_in": found.one_in,
            "told_percent": {f"{memory:g}": round(share, 2) for memory, share in found.told.items()},
            "replayed_percent": {f"{memory:g}": round(share, 2) for memory, share in found.replayed.items()},
            "worth_error_percent": {f"{memory:g}": round(off, 2) for memory, (off, _) in found.worth_errors.items()},
            "worth_may_err_percent": {f"{memory:g}": round(may, 2) for memory, (_, may) in found.worth_errors.items()},
        }
    )


def _print(console: Console, all_found: list[Exactness]) -> None:
    memories = list(all_found[0].told)
    for is_hybrid in sorted({found.is_hybrid for found in all_found}):
        table = Table(box=None, pad_edge=False, title="hybrid" if is_hybrid else "plain", title_justify="left")
        for column in ("", "pool", "one in", *(f"{memory:g} x" for memory in memories)):
            table.add_column(column, justify="right")
        rows = [found for found in all_found if found.is_hybrid == is_hybrid]
        for found in rows:
            cells = (f"{found.told[memory]:.2f} ({found.errors[memory]:+.2f})" for memory in memories)
            table.add_row(found.trace, f"{found.percent:g}%", f"{found.one_in}", *cells)
        for word, pick in (("mean error", np.mean), ("worst error", np.max)):
            cells = (f"{float(pick([abs(found.errors[memory]) for found in rows])):.2f}" for memory in memories)
            table.add_row(word, "", "", *cells)
        console.print(table)


def _print_worth(console: Console, all_found: list[Exactness]) -> None:
    for is_hybrid in sorted({found.is_hybrid for found in all_found}):
        table = Table(box=None, pad_edge=False, title="hybrid" if is_hybrid else "plain", title_justify="left")
        for column in ("", "pool", "one in", *(f"{memory:g} x" for memory in MEMORIES)):
            table.add_column(column, justify="right")
        for found in (one for one in all_found if one.is_hybrid == is_hybrid):
            cells = (f"{off:+.2f} (±{may:.2f})" for off, may in found.worth_errors.values())
            table.add_row(found.trace, f"{found.percent:g}%", f"{found.one_in}", *cells)
        console.print(table)
    errors = [one for found in all_found for one in found.worth_errors.values()]
    within = sum(abs(off) <= may for off, may in errors)
    console.print(f"{within} of {len(errors)} as exact as told; worst {max(abs(off) for off, _ in errors):.2f}%")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace as `kvoffload replay` reads it, beside the generated ones")
    parser.add_argument("--seed", type=int, default=1, help="of the generated traces")
    parser.add_argument("--only", action="append", help="one of the traces, by its name; may be given several times")
    parser.add_argument("--percent", type=float, action="append", help="the pool, of all distinct records")
    parser.add_argument("--hybrid", action="store_true", help="of each trace a hybrid model's replay, too")
    parser.add_argument("--worth", action="store_true", help="saved prefill instead of shares of blocks")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    all_found = []
    for found in _measure_all(options):
        all_found.append(found)
        if options.json:
            print(_as_json(found), flush=True)
    if not options.json:
        (_print_worth if options.worth else _print)(Console(width=120), all_found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
