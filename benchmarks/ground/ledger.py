"""Compares the blocks that a run left in the pool with those that were worth a place, by requests' tokens and not by
what the connector says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from benchmarks.ground.engine import Served, VirtualEngine
from benchmarks.ground.server import ask_counts, list_clients
from kvoffload.cache import needed_blocks
from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.kvspec import ReuseRule
from kvoffload.types import HASH_BYTES

_Key = tuple[int, bytes]
"""Group of the engine's tables, and the engine's own hash."""


@dataclass
class EvictionLog:
    """Blocks that an engine's pool has evicted from its own cache. vLLM reports them as it reports its metrics."""

    taken: list[_Key] = field(default_factory=list)

    def on_block_evicted(self, block: Any) -> None:
        if block.block_hash is not None:
            self.taken.append((get_group_id(block.block_hash), bytes(get_block_hash(block.block_hash))))

    def on_block_allocated(self, block: Any) -> None:
        pass

    def on_block_accessed(self, block: Any) -> None:
        pass

    def reset(self) -> None:
        pass


def watch_evictions(engine: VirtualEngine) -> EvictionLog:
    """Records the evictions of an engine from now on."""
    log: Any = EvictionLog()
    engine.scheduler.kv_cache_manager.block_pool.metrics_collector = log
    return log  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Share:
    """A part of a number of blocks."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of if self.of else 1.0


class PoolLedger:
    """The ledger of one engine with our connector. It asks the index that the engine itself reads."""

    def __init__(self, engine: VirtualEngine) -> None:
        connector: Any = engine.scheduler.connector
        self._parts = connector.scheduler_side.parts
        self._clients = list_clients(engine)
        self._worth: dict[_Key, bytes] = {}
        """Names in the pool of all blocks that are worth saving."""

    def add(self, served: Iterable[Served]) -> None:
        """Full attention is worth its full blocks; windows and states what hits need that end where a prompt or a
        request does. In a model with states nothing is worth anything beyond the last one that the engine can keep."""
        groups = self._parts.groups
        for one in served:
            chain = BlockChain(groups)
            chain.follow(one.request.block_hashes)
            prompt, computed = len(one.ask.prompt), one.ask.tokens - 1
            ends = {groups.align(prompt - 1)}
            if not groups.with_states:
                ends |= {groups.align(prompt), groups.align(computed)}
            for group in groups.of_table.values():
                rule = groups.rules[group]
                if rule.reuse is ReuseRule.PREFIX and not groups.with_states:
                    self._note(one, chain, group, range(computed // rule.block_size))
                    continue
                for end in ends:
                    self._note(one, chain, group, needed_blocks(rule, local=0, boundary=end))

    def count_saved(self) -> Share:
        """How many of them are in the pool."""
        saved = self._count_present(self._worth)
        return Share(saved, len(self._worth))

    def count_taken(self, log: EvictionLog) -> Share:
        """How many of those that the engine took from its own cache are in the pool."""
        taken = {key for key in log.taken if key in self._worth}
        return Share(self._count_present(taken), len(taken))

    def count_bytes(self, record_bytes: Sequence[int]) -> int:
        """Returns the bytes of the blocks that `count_saved` counts, by those of a block in each group of the engine's
        tables."""
        tables = {key[0] for key in self._worth}
        return sum(
            record_bytes[table] * self._count_present([key for key in self._worth if key[0] == table])
            for table in tables
        )

    def _note(self, one: Served, chain: BlockChain, group: int, positions: range) -> None:
        index, per_block = self._parts.groups.facts[group].index, self._parts.groups.hashes_per_block[group]
        hashes, names = one.request.block_hashes, chain.names(group, positions)
        for at, position in enumerate(positions):
            name = names[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            self._worth[index, bytes(hashes[(position + 1) * per_block - 1])] = name

    def _count_present(self, keys: Iterable[_Key]) -> int:
        for client in self._clients:
            # Blocks that the last step of a run committed are still on their way, whatever the engine's clock says.
            ask_counts(client)
        by_table: dict[int, list[bytes]] = {}
        for key in keys:
            by_table.setdefault(key[0], []).append(self._worth[key])
        return sum(int(np.sum(self._find_present(table, names))) for table, names in by_table.items())

    def _find_present(self, table: int, names: Sequence[bytes]) -> Any:
        """Counts a block of a pipeline only if each stage has stored its part: otherwise it is of no use."""
        groups, joined = self._parts.groups, b"".join(names)
        first = groups.of_table[table]
        stages = (first, *groups.other_stages[first])
        return np.logical_and.reduce([self._parts.cache.lookup(group, joined) for group in stages])
