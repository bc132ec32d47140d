"""A rank's part of the cache's records: which are its own, where they lie in memory, and whether they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.cache import SegmentMap
from kvoffload.connector.step_plan import BlockMoves, LoadJob
from kvoffload.hash_rows import as_rows
from kvoffload.native import finish_digests
from kvoffload.transfer.copy_engine import CopyItems, RunDigests

_NOT_MINE = -1


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank does with the blocks of one of the session's groups."""

    group: int
    """It is counted as the session does."""
    own_group: int
    """The same group in the rank's own page map."""
    shard: int
    record_bytes: int

    @property
    def begin(self) -> int:
        """Where its record begins in a slot."""
        return self.shard * self.record_bytes


class RankRecords:
    """Finds a rank's records in an engine's session. All shards of a group's block lie in one slot, one behind the
    other; groups without a part are those of other stages.

    `fingerprint`: the engine's, which digests are made with. `groups`: how many the session has.
    """

    def __init__(self, parts: Sequence[RankPart], *, groups: int, fingerprint: bytes) -> None:
        self.parts = tuple(parts)
        self._fingerprint = fingerprint
        self._own_groups = np.full(groups, _NOT_MINE, np.int64)
        for part in parts:
            self._own_groups[part.group] = part.own_group
        self._has_all = len(parts) == groups

    def find_mine(self, moves: BlockMoves) -> npt.NDArray[np.intp] | slice:
        """Returns which of these moves are this rank's."""
        return slice(None) if self._has_all else np.flatnonzero(self._own_groups[moves.groups] != _NOT_MINE)

    def find_items(self, memory: SegmentMap, moves: BlockMoves) -> CopyItems:
        """Returns what is to be copied of these moves, with where each record lies in this process. ValueError: one
        lies nowhere."""
        mine = self.find_mine(moves)
        groups, addresses = moves.groups[mine], moves.addresses[mine]
        slots = np.empty(len(groups), np.uint64)
        for part in self.parts:
            of_part = groups == part.group
            if of_part.any():
                slots[of_part] = memory.pointers(addresses[of_part] + np.uint64(part.begin), part.record_bytes)
        return CopyItems(group=self._own_groups[groups], block=moves.blocks[mine], slot=slots)

    def compare(self, job: LoadJob, totals: RunDigests) -> str:
        """What is wrong with the first loaded record whose bytes are not those that were saved; empty: all are."""
        assert job.wanted is not None
        mine = self.find_mine(job.moves)
        groups, blocks = job.moves.groups[mine], job.moves.blocks[mine]
        names, digests = as_rows(job.wanted.hashes)[mine], job.wanted.digests[:, mine]
        for part in self.parts:
            of_part = np.flatnonzero(groups == part.group)
            if not len(of_part):
                continue
            found = finish_digests(
                totals[of_part].tobytes(),
                part.record_bytes,
                fingerprint=self._fingerprint,
                block_hashes=names[of_part].tobytes(),
                group=part.group,
                shard=part.shard,
            )
            wanted = digests[part.shard, of_part]
            # 0: nobody has made a digest of this record yet.
            bad = (np.frombuffer(found, np.uint64) != wanted) & (wanted != 0)
            if bad.any():
                block = int(blocks[of_part[bad.argmax()]])
                return f"a record of group {part.group} is not what was saved (loaded into block {block})"
        return ""
