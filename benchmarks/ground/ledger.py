"""Compares the blocks that a run left in the pool with those that were worth a place, by requests' tokens and not by
what the connector says, and finds for tokens that another connector hits where ours lost them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from benchmarks.ground.engine import Served, VirtualEngine
from benchmarks.ground.server import ask_counts, list_clients
from kvoffload.cache import needed_blocks
from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Miss
from kvoffload.types import HASH_BYTES

_Key = tuple[int, bytes]
"""Group of the engine's tables, and the engine's own hash."""
_Named = tuple[int, bytes]
"""Group of the session, and the name in the pool."""


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


@dataclass
class _Asked:
    """The blocks of a request that were there when the engine last asked for it before it ran."""

    at_s: float
    local: int
    """Tokens that the engine had itself."""
    present: list[npt.NDArray[np.bool_]]
    """A flag for each block of the prompt, by group."""


_KINDS = {ReuseRule.PREFIX: "block", ReuseRule.EXACT_BOUNDARY: "state"}
_LATE = (Miss.SLOW_TO_ANSWER.label, Miss.TIER_TOO_SLOW.label)


class PoolLedger:
    """The ledger of one engine with our connector. It asks the index that the engine itself reads."""

    def __init__(self, engine: VirtualEngine) -> None:
        connector: Any = engine.scheduler.connector
        self._parts = connector.scheduler_side.parts
        self._clients = list_clients(engine)
        self._worth: dict[_Key, bytes] = {}
        """Names in the pool of all blocks that are worth saving."""
        self._computed_s: dict[_Named, float] = {}
        """When each of them was first computed."""
        self._machine = engine.machine
        self._asked: dict[str, _Asked] = {}
        self._misses: dict[str, str] = {}
        self._taken_s: dict[int, float] = {}
        """When each slot was taken for a save, by its ticket."""
        self._saves: dict[_Named, list[tuple[float, float]]] = {}
        """When each save of a block began, and when it was published."""

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

    def watch(self, engine: VirtualEngine) -> None:
        """Notes from now on what is there when the engine asks, and when blocks are saved."""
        connector: Any = engine.scheduler.connector
        cache, notes = self._parts.cache, self._parts.restores.notes
        ask, take, publish, note = connector.get_num_new_matched_tokens, cache.take, cache.publish, notes.note

        def watched_ask(request: Any, local: int) -> Any:
            # Before it asks: a hit's own lease may evict others' blocks, and does not change what was there.
            self._note_asked(request, local)
            return ask(request, local)

        def watched_take(group: int, count: int) -> Any:
            slots = take(group, count)
            self._taken_s.update(dict.fromkeys(slots.tickets.tolist(), self._machine.clock.now_s))
            return slots

        def watched_publish(publication: Any) -> bool:
            slots, now_s = publication.slots, self._machine.clock.now_s
            for at, ticket in enumerate(slots.tickets.tolist()):
                name = bytes(publication.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])
                self._saves.setdefault((slots.group, name), []).append((self._taken_s.get(ticket, now_s), now_s))
            return bool(publish(publication))

        def watched_note(tracked: Any, **found: Any) -> None:
            self._misses[tracked.request.request_id] = found["reason"].label
            note(tracked, **found)

        connector.get_num_new_matched_tokens = watched_ask
        cache.take, cache.publish, notes.note = watched_take, watched_publish, watched_note

    def explain(self, served: Sequence[Served], wanted: Mapping[str, int]) -> Counter[str]:
        """Returns for the tokens that `wanted` has hit and the watched run has not, by request, where they were lost.
        The run has been added to the ledger. Each lost token counts once."""
        lost: Counter[str] = Counter()
        for one in served:
            hit, boundary = one.cached_tokens, wanted.get(one.ask.name, 0)
            if boundary <= hit:
                continue
            asked, groups = self._asked[one.ask.name], self._parts.groups
            chain = BlockChain(groups)
            chain.follow(one.request.block_hashes)
            reached, reason = boundary, ""
            for group in groups.prefixes:
                size = groups.rules[group].block_size
                first = asked.local // size
                missing = np.flatnonzero(~asked.present[group][first : boundary // size])
                if len(missing) and (at := first + int(missing[0])) * size < reached:
                    reached, reason = at * size, self._find_loss(one, chain, group, at, asked.at_s)
            reached = max(groups.align(reached), hit)
            if reached < boundary:
                lost[reason] += boundary - reached
            if reached > hit:
                lost[self._find_loss_at(one, chain, asked, reached)] += reached - hit
        return lost

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
        in_prompt = len(one.ask.prompt) // self._parts.groups.rules[group].block_size
        for at, position in enumerate(positions):
            name = names[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            self._worth[index, bytes(hashes[(position + 1) * per_block - 1])] = name
            computed_s = one.first_s if position < in_prompt else one.ended_s
            self._computed_s[group, name] = min(computed_s, self._computed_s.get((group, name), computed_s))

    def _note_asked(self, request: Any, local: int) -> None:
        groups = self._parts.groups
        chain = BlockChain(groups)
        chain.follow(request.block_hashes)
        self._asked[request.request_id] = _Asked(
            self._machine.clock.now_s,
            local,
            [
                self._find_present(facts.index, [chain.names(group, range(chain.tokens // rule.block_size))])
                for group, (facts, rule) in enumerate(zip(groups.facts, groups.rules, strict=True))
            ],
        )

    def _find_loss_at(self, one: Served, chain: BlockChain, asked: _Asked, boundary: int) -> str:
        """Finds why there was no hit at a boundary up to which all blocks of full attention are there."""
        groups = self._parts.groups
        for group in groups.of_table.values():
            needed = needed_blocks(groups.rules[group], local=asked.local, boundary=boundary)
            for at in needed if group not in groups.prefixes else ():
                if not asked.present[group][at]:
                    return self._find_loss(one, chain, group, at, asked.at_s)
        miss = self._misses.get(one.ask.name, "")
        if miss in (Miss.NEVER_SEEN.label, Miss.TOO_SHORT.label, ""):
            return "saved too late"
        return "late" if miss in _LATE else f"refused, {miss}"

    def _find_loss(self, one: Served, chain: BlockChain, group: int, at: int, asked_s: float) -> str:
        """Finds why a block was not there when it was asked for."""
        name = group, chain.names(group, range(at, at + 1))
        kind = _KINDS.get(self._parts.groups.rules[group].reuse, "window")
        saves = self._saves.get(name, [])
        if any(published_s <= asked_s for _, published_s in saves):
            return f"{kind} evicted"
        # A save that begins in the step that asks is the asking request's own.
        if any(begun_s < asked_s for begun_s, _ in saves):
            return f"{kind} saved too late"
        computed_s = self._computed_s.get(name, one.first_s)
        if computed_s >= one.first_s:
            # No request before this one had it where the rules save it.
            return f"{kind} never saved"
        return f"{kind} found no slot" if computed_s <= asked_s else f"{kind} saved too late"

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
