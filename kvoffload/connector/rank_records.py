"""A rank's part of the cache's records: where it lies in memory, what of a slot it leaves, and whether it is whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cache import SegmentMap
from kvoffload.connector.step_plan import BlockMoves, LoadJob
from kvoffload.hash_rows import as_rows
from kvoffload.native import finish_digests
from kvoffload.transfer.copy_engine import CopyItems, RunDigests


class RankRecords:
    """Finds a rank's records in an engine's session. All shards of a block lie in one slot, one behind the other.

    `shards`: the rank's, in a row: of each block it has a record for every one of them. `page_groups`: by group, that
    of the rank's page map which has the first of them; the others' follow. `slot_bytes`: by group, of each shard's part
    of a slot; more than a record where another rank's is larger. `fingerprint`: the engine's, which digests are made
    with.
    """

    def __init__(
        self,
        *,
        shards: range,
        fingerprint: bytes,
        record_bytes: Sequence[int],
        slot_bytes: Sequence[int],
        page_groups: Sequence[int],
    ) -> None:
        self._shards = shards
        self._fingerprint = fingerprint
        self._record_bytes = tuple(record_bytes)
        self.slot_bytes = tuple(slot_bytes)
        self._page_groups = np.array(page_groups, np.int64)

    def find_items(self, memory: SegmentMap, moves: BlockMoves) -> CopyItems:
        """Returns what to copy: of each block in turn, all of this rank's records. ValueError: one lies nowhere."""
        local = np.arange(len(self._shards))
        return CopyItems(
            group=(self._page_groups[moves.groups][:, None] + local).reshape(-1),
            block=np.repeat(moves.blocks, len(local)),
            slot=self.find_slots(memory, moves).reshape(-1),
        )

    def find_slots(self, memory: SegmentMap, moves: BlockMoves) -> npt.NDArray[np.uint64]:
        """Returns where each record lies in this process: a row for each block. ValueError: one lies nowhere."""
        local = np.arange(len(self._shards), dtype=np.uint64)
        slots = np.empty((len(moves), len(local)), np.uint64)
        for group, slot_bytes in enumerate(self.slot_bytes):
            mine = moves.groups == group
            if mine.any():
                first = moves.addresses[mine] + np.uint64(self._shards.start * slot_bytes)
                pointers = memory.pointers(first, len(local) * slot_bytes)
                slots[mine] = pointers[:, None] + local * np.uint64(slot_bytes)
        return slots

    def clear_tails(self, memory: SegmentMap, moves: BlockMoves) -> None:
        """What this rank's records leave of their slots is part of their digests, as zeros."""
        for group, (record_bytes, slot_bytes) in enumerate(zip(self._record_bytes, self.slot_bytes, strict=True)):
            if record_bytes < slot_bytes:
                for address in moves.addresses[moves.groups == group].tolist():
                    for shard in self._shards:
                        memory.view(address + shard * slot_bytes + record_bytes, slot_bytes - record_bytes)[:] = 0

    def split_digests(self, totals: RunDigests) -> dict[int, bytes]:
        """By shard, what a copy of all items has found: the digests of its records, in the order of the blocks."""
        by_block = totals.reshape(-1, len(self._shards), 2)
        return {shard: by_block[:, at].tobytes() for at, shard in enumerate(self._shards)}

    def compare(self, job: LoadJob, totals: RunDigests) -> str:
        """What is wrong with the first loaded record whose bytes are not those that were saved; empty: all are."""
        assert job.wanted is not None
        by_block = totals.reshape(-1, len(self._shards), 2)
        found = (self._compare(job, shard, by_block[:, at]) for at, shard in enumerate(self._shards))
        return next(filter(None, found), "")

    def _compare(self, job: LoadJob, shard: int, totals: RunDigests) -> str:
        assert job.wanted is not None
        names = as_rows(job.wanted.hashes)
        wanted = job.wanted.digests[shard]
        for group, slot_bytes in enumerate(self.slot_bytes):
            mine = np.flatnonzero(job.moves.groups == group)
            if not len(mine):
                continue
            found = finish_digests(
                totals[mine].tobytes(),
                slot_bytes,
                fingerprint=self._fingerprint,
                block_hashes=names[mine].tobytes(),
                group=group,
                shard=shard,
            )
            # 0: nobody has made a digest of this record yet.
            bad = (np.frombuffer(found, np.uint64) != wanted[mine]) & (wanted[mine] != 0)
            if bad.any():
                block = int(job.moves.blocks[mine[bad.argmax()]])
                return f"a record of group {group} is not what was saved (loaded into block {block})"
        return ""
