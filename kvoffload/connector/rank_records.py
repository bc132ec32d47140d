"""A rank's part of the cache's records: which are its own, where they lie in memory, and whether they are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.cache import SegmentMap
from kvoffload.connector.common.step_plan import BlockMoves, LoadJob, SaveJob
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.engines.record_mover import RecordDigests
from kvoffload.hash_rows import as_rows
from kvoffload.transfer.copy_engine import CopyItems, RunDigests


class PlannedSave(NamedTuple):
    """A rank's copies of a save job."""

    items: CopyItems
    scratch: npt.NDArray[np.uint8]
    """Memory for records of which only the digests are wanted. The caller keeps it until the copies have ended."""


class RankRecords:
    """Finds a rank's records in an engine's session. All shards of a group's block lie in one slot, one behind the
    other.

    `own_groups`: for each group of the session that the rank has, the group of its page map with the first of its
    shards; those of the other shards follow. `record_bytes`: size of one shard, by group of the session. `fingerprint`:
    the engine's, which goes into digests.
    """

    def __init__(
        self, part: RankPart, *, fingerprint: bytes, record_bytes: Sequence[int], own_groups: Mapping[int, int]
    ) -> None:
        self.part = part
        self.record_bytes = tuple(record_bytes)
        self._digests = RecordDigests(fingerprint, self.record_bytes)
        self._sizes = np.array(record_bytes, np.int64)
        self._groups = tuple(own_groups)
        self.own_groups = np.zeros(len(record_bytes), np.int64)
        for group, own in own_groups.items():
            self.own_groups[group] = own

    def begin_of(self, group: int) -> int:
        """Returns where this rank's records begin in a slot of the group, in bytes."""
        return int(self.part.shards[group]) * self.record_bytes[group]

    def plan_save(self, memory: SegmentMap, job: SaveJob) -> PlannedSave:
        """Plans the records that this rank writes, and those of which it only makes digests. ValueError: a slot's
        address is not in the memory."""
        digested = self.part.find_digested(job)
        moves, is_written = job.moves.choose(digested), self.part.find_written(job)[digested]
        firsts = np.empty(len(moves), np.uint64)
        firsts[is_written] = self._find_firsts(memory, moves.choose(is_written))
        sizes = self._sizes[moves.groups[~is_written]] * self.part.run
        scratch = np.empty(int(sizes.sum()), np.uint8)
        firsts[~is_written] = scratch.ctypes.data + np.cumsum(sizes) - sizes
        return PlannedSave(self._make_items(moves, firsts), scratch)

    def plan_load(self, memory: SegmentMap, moves: BlockMoves) -> CopyItems:
        """Plans this rank's part of a load. ValueError: a record's address is not in the memory."""
        mine = moves.choose(self.part.find_loaded(moves))
        return self._make_items(mine, self._find_firsts(memory, mine))

    def compare(self, job: LoadJob, totals: RunDigests) -> str:
        """Returns a line about the first loaded record whose bytes are not those that were saved; empty: there is
        none."""
        assert job.wanted is not None
        at = np.flatnonzero(self.part.find_loaded(job.moves))
        groups, blocks, names = job.moves.groups[at], job.moves.blocks[at], as_rows(job.wanted.hashes)[at]
        by_shard = totals.reshape(len(at), self.part.run, 2)
        for group, offset in product(self._groups, range(self.part.run)):
            mine = np.flatnonzero(groups == group)
            if not len(mine):
                continue
            shard = int(self.part.shards[group]) + offset
            bad = self._digests.find_wrong(
                by_shard[mine, offset],
                names[mine].tobytes(),
                job.wanted.digests[shard, at[mine]],
                group=group,
                shard=shard,
            )
            if len(bad):
                block = int(blocks[mine[bad[0]]])
                return f"a record of group {group} differs from the saved bytes (loaded into block {block})"
        return ""

    def _find_firsts(self, memory: SegmentMap, moves: BlockMoves) -> npt.NDArray[np.uint64]:
        """Returns the address in this process of this rank's first record of each block."""
        firsts = np.empty(len(moves), np.uint64)
        for group in self._groups:
            mine = moves.groups == group
            if mine.any():
                first = moves.addresses[mine] + np.uint64(self.begin_of(group))
                firsts[mine] = memory.pointers(first, self.part.run * self.record_bytes[group])
        return firsts

    def _make_items(self, moves: BlockMoves, firsts: npt.NDArray[np.uint64]) -> CopyItems:
        """Of each block in turn, all of this rank's records, one behind the other."""
        own = self.own_groups[moves.groups]
        if self.part.run == 1:
            return CopyItems(group=own, block=moves.blocks, slot=firsts)
        local = np.arange(self.part.run)
        offsets = (self._sizes[moves.groups][:, None] * local).astype(np.uint64)
        return CopyItems(
            group=(own[:, None] + local).reshape(-1),
            block=np.repeat(moves.blocks, self.part.run),
            slot=(firsts[:, None] + offsets).reshape(-1),
        )
