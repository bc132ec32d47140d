"""Which rule for saving brings most of a trace back, when the engine's own cache and a pool are in front of each other?

An engine's cache and a pool, both least recently used, deepest block first; requests one after the other. It needs a
trace as `kvoffload replay` reads it. The connector's code is not run here: `auto` is the rule that it goes by.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvoffload.cache.trace import read_trace

ENGINE_PERCENTS = (2, 5, 10, 20)
POOL_RATIOS = (0.25, 1, 4)
Blocks = Sequence[int]


@dataclass
class Lru:
    """Blocks by their last use."""

    capacity: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def is_full(self) -> bool:
        return len(self.blocks) >= self.capacity

    def count_prefix(self, blocks: Blocks) -> int:
        """How many at the beginning are there."""
        return next((at for at, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def use(self, blocks: Blocks) -> list[int]:
        """The last one goes first, as engines free them; what had to go is the answer."""
        gone = []
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
            if len(self.blocks) > self.capacity:
                gone.append(self.blocks.popitem(last=False)[0])
        return gone


@dataclass
class Setting:
    """The caches and counts that a rule may look at."""

    engine: Lru
    pool: Lru
    uses: Counter[int] = field(default_factory=Counter)


Rule = Callable[[Setting, Blocks, Blocks], Iterable[int]]
"""Chooses what is saved at once, of the blocks that a request computed and of those that it found in the engine."""
Admits = Callable[[Setting, int], bool]
"""Decides whether a block that the engine has lost goes into the pool."""


def save_all(setting: Setting, computed: Blocks, used: Blocks) -> Blocks:
    return [*used, *computed]


def save_none(setting: Setting, computed: Blocks, used: Blocks) -> Blocks:
    return ()


def save_used(setting: Setting, computed: Blocks, used: Blocks) -> Blocks:
    """All, while there is room; then what the engine has used again."""
    return used if setting.pool.is_full else [*used, *computed]


def admit_all(setting: Setting, block: int) -> bool:
    return True


def admit_none(setting: Setting, block: int) -> bool:
    return False


def admit_estimated(setting: Setting, block: int) -> bool:
    """Admits by the pool's own estimate: not in the place of a block that was used more often."""
    if not setting.pool.is_full:
        return True
    victim = next(iter(setting.pool.blocks))
    return setting.uses[block] >= setting.uses[victim]


RULES: dict[str, tuple[Rule, Admits]] = {
    "eager": (save_all, admit_none),
    "on_evict": (save_none, admit_all),
    "auto": (save_used, admit_all),
    "auto, asking the pool": (save_used, admit_estimated),
    "used twice alone": (save_used, admit_none),
}


def count_hits(requests: Iterable[Blocks], *, engine: int, pool: int, rule: Rule, admits: Admits) -> tuple[int, int]:
    """Blocks that the engine itself had, and that the pool brought."""
    setting = Setting(Lru(engine), Lru(pool))
    own = restored = 0
    for blocks in requests:
        found = setting.engine.count_prefix(blocks)
        below = setting.pool.count_prefix(blocks[found:])
        own, restored = own + found, restored + below
        setting.uses.update(blocks)
        if below:
            setting.pool.use(blocks[found : found + below])
        gone = setting.engine.use(blocks)
        wanted = rule(setting, blocks[found + below :], blocks[:found])
        setting.pool.use([block for block in wanted if block not in setting.pool.blocks])
        for block in gone:
            if block not in setting.pool.blocks and admits(setting, block):
                setting.pool.use([block])
    return own, restored


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    requests = [request.full_blocks(512) for request in read_trace(options.trace)]
    distinct = len({block for blocks in requests for block in blocks})
    asked = sum(map(len, requests))
    table = Table("engine's cache, % of all blocks", "pool, times that", *RULES, title="blocks hit, %")
    for percent in ENGINE_PERCENTS:
        for ratio in POOL_RATIOS:
            engine = distinct * percent // 100
            cells = []
            for rule, admits in RULES.values():
                hits = sum(count_hits(requests, engine=engine, pool=int(engine * ratio), rule=rule, admits=admits))
                cells.append(f"{100 * hits / asked:.2f}")
            table.add_row(str(percent), f"{ratio:g}", *cells)
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
