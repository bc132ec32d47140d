"""A rank's part of the cache's records: where it lies in memory, what of a slot it leaves, and whether it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.cache import SegmentMap
from kvoffload.connector.rank_part import RankPart
from kvoffload.connector.step_plan import BlockMoves, LoadJob, SaveJob
from kvoffload.hash_rows import as_rows
from kvoffload.native import finish_digests
from kvoffload.transfer.copy_engine import RunDigests


class PlannedSave(NamedTuple):
    """What a rank copies of a save job."""

    moves: BlockMoves
    slots: npt.NDArray[np.uint64]
    scratch: npt.NDArray[np.uint8]
    """Memory of the slots whose bytes nobody reads: only their digests are wanted. To be kept until it is copied."""


class RankRecords:
    """Finds a rank's records in an engine's session. All shards of a block lie in one slot, one behind the other.

    `slot_bytes`: by group, of each shard's part of a slot; more than a record where another rank's is larger.
    `fingerprint`: the engine's, which digests are made with.
    """

    def __init__(
        self, part: RankPart, *, fingerprint: bytes, record_bytes: Sequence[int], slot_bytes: Sequence[int]
    ) -> None:
        self.part = part
        self._fingerprint = fingerprint
        self._record_bytes = np.array(record_bytes, np.int64)
        self.slot_bytes = tuple(slot_bytes)

    def plan_save(self, memory: SegmentMap, job: SaveJob) -> PlannedSave:
        """Where the records go that are this rank's to write, and those that it only makes digests of. ValueError: one
        lies nowhere."""
        digested = self.part.find_digested(job)
        moves, is_written = job.moves.choose(digested), self.part.find_written(job)[digested]
        written = moves.choose(is_written)
        slots = np.empty(len(moves), np.uint64)
        slots[is_written] = self.find_slots(memory, written)
        self.clear_tails(memory, written)
        sizes = self._record_bytes[moves.groups[~is_written]]
        scratch = np.empty(int(sizes.sum()), np.uint8)
        slots[~is_written] = scratch.ctypes.data + np.cumsum(sizes) - sizes
        return PlannedSave(moves, slots, scratch)

    def find_slots(self, memory: SegmentMap, moves: BlockMoves) -> npt.NDArray[np.uint64]:
        """Returns where each record lies in this process. ValueError: one lies nowhere."""
        slots = np.empty(len(moves), np.uint64)
        for group, slot_bytes in enumerate(self.slot_bytes):
            mine = moves.groups == group
            if mine.any():
                slots[mine] = memory.pointers(moves.addresses[mine] + np.uint64(self._find_offset(group)), slot_bytes)
        return slots

    def clear_tails(self, memory: SegmentMap, moves: BlockMoves) -> None:
        """What this rank's records leave of their slots is part of their digests, as zeros."""
        for group, (record_bytes, slot_bytes) in enumerate(
            zip(self._record_bytes.tolist(), self.slot_bytes, strict=True)
        ):
            if record_bytes < slot_bytes:
                for address in moves.addresses[moves.groups == group].tolist():
                    tail = address + self._find_offset(group) + record_bytes
                    memory.view(tail, slot_bytes - record_bytes)[:] = 0

    def compare(self, job: LoadJob, totals: RunDigests) -> str:
        """What is wrong with the first loaded record whose bytes are not those that were saved; empty: all are."""
        assert job.wanted is not None
        names = as_rows(job.wanted.hashes)
        for group, slot_bytes in enumerate(self.slot_bytes):
            mine = np.flatnonzero(job.moves.groups == group)
            if not len(mine):
                continue
            shard = int(self.part.shards[group])
            found = finish_digests(
                totals[mine].tobytes(),
                slot_bytes,
                fingerprint=self._fingerprint,
                block_hashes=names[mine].tobytes(),
                group=group,
                shard=shard,
            )
            wanted = job.wanted.digests[shard, mine]
            # 0: nobody has made a digest of this record yet.
            bad = (np.frombuffer(found, np.uint64) != wanted) & (wanted != 0)
            if bad.any():
                block = int(job.moves.blocks[mine[bad.argmax()]])
                return f"a record of group {group} is not what was saved (loaded into block {block})"
        return ""

    def _find_offset(self, group: int) -> int:
        """Where this rank's shard begins in a slot."""
        return int(self.part.shards[group]) * self.slot_bytes[group]
