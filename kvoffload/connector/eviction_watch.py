"""The policy `on_evict`: a block is saved when the engine is about to lose it, and not before.

The engine takes new blocks from the head of its free queue, so whatever is cached there goes next. Every step looks at
as many blocks as the next few steps may take. What is saved returns to the head: saving a block is no use of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.connector import vllm_compat
from kvoffload.connector.group_table import GroupTable
from kvoffload.connector.named_blocks import NamedBlocks
from kvoffload.connector.save_worth import Candidates
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

MAX_LOOKED_AT = 256
"""Blocks of the queue in one step. An engine that takes more in a step loses the rest unsaved."""

_Key = tuple[int, bytes]
"""Position in the engine's tables, and the engine's own hash."""


class EvictionWatch:
    """A `SavePolicy`. Knows the names of blocks that are worth saving: at most `limit` of them, the oldest is forgotten
    first."""

    is_watching = True
    saves_at_once = False

    def __init__(self, pool: BlockPool, groups: GroupTable, *, limit: int) -> None:
        self._pool = pool
        self._groups = groups
        self._limit = limit
        self._names: dict[_Key, tuple[bytes, bytes, str]] = {}
        """Of blocks that were worth saving when they became full: name, parent and tenant."""
        self._head: tuple[int, int] = (-1, -1)

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        """What is to be kept for a while has to be there first; what an adapter holds is known only now."""
        at_once = []
        for one in candidates:
            if one.tracked.terms.pin_s > 0 or one.tracked.request.lora_request is not None:
                at_once.append(one)
            else:
                self._note(one)
        while len(self._names) > self._limit:
            del self._names[next(iter(self._names))]
        return at_once

    def give_up(self, named: NamedBlocks) -> None:
        """They are not tried again before they are offered again."""
        rows = named.hashes
        bad = {rows[at : at + HASH_BYTES] for at in range(0, len(rows), HASH_BYTES)}
        for key in [key for key, (name, _, _) in self._names.items() if name in bad]:
            del self._names[key]

    def forget_all(self) -> None:
        self._names.clear()

    def look_again(self) -> None:
        """What is saved returns to the head, which looks the same then."""
        self._head = (-1, -1)

    def find(self) -> list[NamedBlocks]:
        """What the engine takes next, of what is worth saving; by group."""
        free = vllm_compat.next_free_blocks(self._pool, MAX_LOOKED_AT)
        head = (free[0].block_id, free[-1].block_id) if free else (-1, -1)
        if head == self._head:
            return []
        self._head = head
        found: dict[tuple[int, str], list[tuple[int, bytes, bytes]]] = {}
        for block in free:
            key = vllm_compat.full_block_key(block, self._groups.block_size_of_table)
            known = self._names.get(key) if key is not None else None
            if known is not None and key is not None:
                name, parent, tenant = known
                found.setdefault((self._groups.of_table[key[0]], tenant), []).append((block.block_id, name, parent))
        return [
            NamedBlocks(
                group,
                b"".join(name for _, name, _ in rows),
                b"".join(parent for _, _, parent in rows),
                np.array([block for block, _, _ in rows], np.int64),
                tenant,
            )
            for (group, tenant), rows in sorted(found.items())
        ]

    def _note(self, one: Candidates) -> None:
        index = self._groups.facts[one.group].index
        per_block = self._groups.hashes_per_block[one.group]
        chain, hashes = one.tracked.chain, one.tracked.request.block_hashes
        names, parents = chain.names(one.group, one.positions), chain.parents(one.group, one.positions)
        for at, position in enumerate(one.positions):
            part = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
            key = (index, bytes(hashes[(position + 1) * per_block - 1]))
            self._names.pop(key, None)
            self._names[key] = names[part], parents[part], one.tracked.terms.tenant
