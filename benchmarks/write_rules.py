"""Finds which blocks need not be written to a disk, and how many hits that costs.

Replays traces over a memory and a disk below it that both evict by recency. Writes, and the hits of
both together, are given as shares of what they are if every block is written as soon as it is stored:

* `back`: a block is written when memory drops it, and if the disk does not have it.
* `second_use`: likewise, and only if it was used since it was stored.
* `likely`: likewise, and only if of its class (how often it was used, where in how long a prompt, behind a hit or not)
  so many come back before the disk would have dropped them. That is learned from all that memory drops.

The goal was half of the writes for each block that is read, at 98% of the hits. One JSON line for each trace, memory
and disk.

Run: python -m benchmarks.write_rules [--trace FILE], which takes minutes
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.eviction import list_traces
from benchmarks.evictions.traces import Request

MEMORY_PERCENTS = (2, 5, 10, 20)
"""The sizes of memory, in per cent of the distinct blocks."""
DISK_TIMES = (2, 10)
"""The sizes of the disk, as multiples of memory."""
LIKELY = 0.3
KNOWN = 30
"""Blocks of a class, before it is judged."""
RULES = ("through", "back", "second_use", "likely")

Class = tuple[int, int, int, bool]


@dataclass
class Held:
    """A block in memory."""

    depth: int
    length: int
    is_behind_hit: bool
    uses: int = 0

    @property
    def kind(self) -> Class:
        return min(self.uses, 3), self.depth.bit_length(), self.length.bit_length(), self.is_behind_hit


@dataclass
class Returns:
    """Learns of each class how many come back while a disk of that size would have them."""

    blocks: int
    dropped: OrderedDict[int, Class | None] = field(default_factory=OrderedDict)
    """The last ones that memory dropped; None: it has come back."""
    all: Counter[Class] = field(default_factory=Counter)
    back: Counter[Class] = field(default_factory=Counter)

    def drop(self, block: int, kind: Class) -> None:
        self.dropped.setdefault(block, kind)
        self.dropped.move_to_end(block)
        if len(self.dropped) > self.blocks:
            _, gone = self.dropped.popitem(last=False)
            self.all.update([gone] if gone is not None else [])

    def ask(self, block: int) -> None:
        if block not in self.dropped:
            return
        kind, self.dropped[block] = self.dropped[block], None
        self.dropped.move_to_end(block)
        if kind is not None:
            self.all[kind] += 1
            self.back[kind] += 1

    def are_likely(self, kind: Class) -> bool:
        return self.all[kind] < KNOWN or self.back[kind] >= LIKELY * self.all[kind]


@dataclass
class Cache:
    """A memory and a disk, and what they did."""

    rule: str
    memory_blocks: int
    disk_blocks: int
    written: int = 0
    read: int = 0
    hits: int = 0
    """The hits of memory."""

    def __post_init__(self) -> None:
        self._memory: OrderedDict[int, Held] = OrderedDict()
        self._disk: OrderedDict[int, None] = OrderedDict()
        self._returns = Returns(self.disk_blocks)

    def serve(self, request: Request) -> None:
        hit = self._load(request)
        for depth, block in enumerate(request[hit:], hit):
            if block not in self._memory:
                self._returns.ask(block)
                self._memory[block] = Held(depth, len(request), hit > 0)
                if self.rule == "through":
                    self._write(block)
        for block in reversed(request):
            self._memory.move_to_end(block)
        while len(self._memory) > self.memory_blocks:
            block, held = self._memory.popitem(last=False)
            self._drop(block, held)

    def _load(self, request: Request) -> int:
        """How many blocks from the first on are there."""
        for depth, block in enumerate(request):
            if block in self._memory:
                self.hits += 1
                self._memory[block].uses += 1
            elif block in self._disk:
                self.read += 1
                self._disk.move_to_end(block)
                self._returns.ask(block)
                self._memory[block] = Held(depth, len(request), is_behind_hit=True, uses=1)
            else:
                return depth
        return len(request)

    def _drop(self, block: int, held: Held) -> None:
        is_wanted = {
            "through": False,
            "back": True,
            "second_use": held.uses > 0,
            "likely": self.rule == "likely" and self._returns.are_likely(held.kind),
        }[self.rule]
        if self.rule == "likely":
            self._returns.drop(block, held.kind)
        if is_wanted:
            self._write(block)

    def _write(self, block: int) -> None:
        if block not in self._disk:
            self.written += 1
            self._disk[block] = None
        self._disk.move_to_end(block)
        if len(self._disk) > self.disk_blocks:
            self._disk.popitem(last=False)


def compare(requests: Sequence[Request], memory_blocks: int, disk_blocks: int) -> dict[str, dict[str, float]]:
    """Returns of each rule what was written, what was written for each block read, and the hits, as shares of what
    they are if all is written through."""
    caches = {rule: Cache(rule, memory_blocks, disk_blocks) for rule in RULES}
    for cache in caches.values():
        for request in requests:
            cache.serve(request)
    through = caches["through"]
    before = max(through.written / max(through.read, 1), 1e-9)
    return {
        rule: {
            "written": round(cache.written / max(through.written, 1), 3),
            "written_per_read": round(cache.written / max(cache.read, 1) / before, 3),
            "hits": round((cache.hits + cache.read) / max(through.hits + through.read, 1), 3),
        }
        for rule, cache in caches.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace as `kvoffload replay` reads it, beside the generated ones")
    parser.add_argument("--seed", type=int, default=1, help="of the generated traces")
    options = parser.parse_args()
    for name, requests in list_traces(options.trace, seed=options.seed):
        distinct = len({block for request in requests for block in request})
        for percent in MEMORY_PERCENTS:
            for times in DISK_TIMES:
                memory_blocks = max(distinct * percent // 100, 1)
                found = compare(requests, memory_blocks, times * memory_blocks)
                print(json.dumps({"trace": name, "memory_percent": percent, "disk_times": times, **found}), flush=True)


if __name__ == "__main__":
    main()
