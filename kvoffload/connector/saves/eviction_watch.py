"""The policies `on_evict` and `auto`: a block is saved when the engine is about to lose it.

The engine takes new blocks from the head of its free queue, so the cached blocks there go next. Every step looks at as
many blocks as the next few steps may take. A block that is being saved is not in the queue, and returns to its head
afterwards, because saving it is no use of it. Until then the engine takes the blocks behind it. So blocks under way
count as looked at: otherwise all blocks in view would be under way at once, and the engine would take blocks that the
watch has not looked at yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.connector.common.block_chain import fill_hash
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.connector.saves.worth import NULL_BLOCK, Candidates
from kvoffload.hash_rows import Rows, as_rows
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_NOBODY = -1


class EvictionWatch:
    """The policy `on_evict`. It remembers the name under which to save the content of each of the engine's blocks."""

    def __init__(self, pool: BlockPool, groups: GroupTable, *, look_ahead: int) -> None:
        """Watches a pool; `look_ahead` is how many blocks of the queue the next steps may take."""
        self._pool = pool
        self._groups = groups
        self.look_ahead = look_ahead
        blocks = len(pool.blocks)
        # The operating system gives these pages memory only when they are first written.
        self._names: Rows = np.zeros((blocks, HASH_BYTES), np.uint8)
        self._parents: Rows = np.zeros((blocks, HASH_BYTES), np.uint8)
        self._hashes: Rows = np.zeros((blocks, HASH_BYTES), np.uint8)
        """The engine's own hashes, which show whether a block still holds the same content."""
        self._group = np.full(blocks, _NOBODY, np.int16)
        """The group of each block; `_NOBODY`: its content is saved, or not worth saving."""
        self._tenant = np.zeros(blocks, np.int32)
        self._tenants: dict[str, int] = {}
        self._count = 0
        """Number of blocks that were noted and not settled. The engine may have taken some of them since."""
        self._head: tuple[int, int] = (-1, -1)

    @property
    def is_watching(self) -> bool:
        return self._count > 0

    @property
    def saves_at_once(self) -> bool:
        return False

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        """Returns the blocks that cannot wait, and notes the others. Blocks that a hint retains must be stored first;
        those of an adapter must be saved while its contents are known."""
        at_once = []
        for one in candidates:
            if _cannot_wait(one):
                at_once.append(one)
            else:
                self._note(one)
        return at_once

    def keep(self, candidates: Sequence[Candidates]) -> bool:
        """Notes the blocks if they can wait. Those that are saved already are recognised later."""
        if any(map(_cannot_wait, candidates)):
            return False
        for one in candidates:
            self._note(one)
        return True

    def settle(self, blocks: npt.NDArray[np.int64]) -> None:
        """Forgets these blocks, which are saved now, or were before."""
        self._count -= int(np.count_nonzero(self._group[blocks] != _NOBODY))
        self._group[blocks] = _NOBODY

    def forget_all(self) -> None:
        self._group[:] = _NOBODY
        self._count = 0

    def look_again(self) -> None:
        """Makes `find` look even if the queue's head has not changed: blocks return to it after their save."""
        self._head = (-1, -1)

    def find(self, under_way: int) -> list[NamedBlocks]:
        """Returns, by group, the blocks worth saving that the engine takes next, in the order in which it takes
        them."""
        if not self._count or under_way >= self.look_ahead:
            return []
        free = vllm_compat.next_free_blocks(self._pool, self.look_ahead - under_way)
        head = (free[0].block_id, free[-1].block_id) if free else (-1, -1)
        if head == self._head:
            return []
        self._head = head
        return self._list_known(free)

    def find_all(self) -> list[NamedBlocks]:
        """Returns all blocks worth saving that the engine still holds, whether or not requests use them."""
        blocks = self._pool.blocks
        return self._list_known([blocks[block] for block in np.flatnonzero(self._group != _NOBODY).tolist()])

    def _list_known(self, blocks: Sequence[KVCacheBlock]) -> list[NamedBlocks]:
        ids = np.array([block.block_id for block in blocks], np.int64)
        known = np.flatnonzero(self._group[ids] != _NOBODY)
        holds = np.array([self._holds(blocks[at]) for at in known.tolist()], np.bool_)
        self.settle(ids[known[~holds]])
        ids = ids[known[holds]]
        return list(self._name_all(ids))

    def _name_all(self, ids: npt.NDArray[np.int64]) -> Iterator[NamedBlocks]:
        tenants = list(self._tenants)
        keys = self._group[ids].astype(np.int64) << 32 | self._tenant[ids]
        for key in np.unique(keys).tolist():
            mine = ids[keys == key]
            yield NamedBlocks(
                key >> 32,
                self._names[mine].tobytes(),
                self._parents[mine].tobytes(),
                mine,
                tenants[key & 0xFFFFFFFF],
            )

    def _holds(self, block: KVCacheBlock) -> bool:
        """Returns whether a block still holds the content that was noted."""
        key = vllm_compat.full_block_key(block, self._groups.block_size_of_table)
        if key is None:
            return False
        table, name = key
        at = block.block_id
        is_same_group = self._groups.of_table[table] == int(self._group[at])
        return is_same_group and fill_hash(name) == self._hashes[at].tobytes()

    def _note(self, one: Candidates) -> None:
        is_there = one.blocks != NULL_BLOCK
        blocks = one.blocks[is_there]
        self.settle(blocks)
        names = as_rows(one.tracked.chain.names(one.group, one.positions))[is_there]
        self._names[blocks] = names
        self._parents[blocks] = as_rows(one.tracked.chain.parents(one.group, one.positions))[is_there]
        self._hashes[blocks] = names ^ as_rows(one.tracked.chain.mask)
        self._tenant[blocks] = self._tenants.setdefault(one.tracked.settings.tenant, len(self._tenants))
        self._group[blocks] = one.group
        self._count += len(blocks)


class Auto(EvictionWatch):
    """The policy `auto`. While the pool has room, every block that is worth saving is saved at once: that displaces
    nothing, and other engines, or this one after a restart, find it. When the pool is full, a block that is used a
    second time is saved at once, and the others when the engine is about to lose them."""

    def __init__(self, pool: BlockPool, groups: GroupTable, *, look_ahead: int, has_room: Callable[[], bool]) -> None:
        super().__init__(pool, groups, look_ahead=look_ahead)
        self._has_room = has_room

    @property
    def saves_at_once(self) -> bool:
        return self._has_room()

    def choose(self, candidates: Sequence[Candidates]) -> Sequence[Candidates]:
        if self._has_room():
            return candidates
        return [*super().choose(candidates), *filter(None, map(self._choose_used, candidates))]

    def _choose_used(self, one: Candidates) -> Candidates | None:
        """Returns those of the blocks noted just now that the engine already had when the request came."""
        used = one.tracked.reused_tokens // self._groups.rules[one.group].block_size - one.positions.start
        if used <= 0 or _cannot_wait(one):
            return None
        return replace(one, positions=one.positions[:used], blocks=one.blocks[:used], is_noted=True)


def _cannot_wait(one: Candidates) -> bool:
    return one.tracked.is_kept or one.tracked.request.lora_request is not None
