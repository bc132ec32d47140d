"""One rank's part of an engine's blocks: which shard of each group it has, and which records it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.connector.common.step_plan import BlockMoves, GroupFacts, SaveJob
from kvoffload.connector.identity.agreement import SharingSettings

_DIGEST_BYTES = 16

Mask = npt.NDArray[np.bool_]
"""A boolean for each move of a job."""


@dataclass(frozen=True, eq=False)
class RankPart:
    """A rank's part of the session's groups. If several ranks hold a shard, the block's hash chooses which of them
    writes it, so that all their links carry load. Workers and the scheduler side make the same value for a rank."""

    rank: int
    is_mine: npt.NDArray[np.bool_]
    """Whether each group of the session belongs to this rank's stage."""
    shards: npt.NDArray[np.int64]
    """The first shard that the rank holds, among those of its server, by group."""
    turns: npt.NDArray[np.int64]
    """The rank's number among the ranks that hold this shard, by group."""
    rows: npt.NDArray[np.int64]
    """The number of the same shard among those of all servers, by group."""
    run: int
    """Number of shards in a row that the rank holds."""

    @classmethod
    def find(cls, rank: int, groups: Sequence[GroupFacts], sharing: SharingSettings) -> RankPart:
        """Returns the part of a rank, of all ranks of the engine counted from 0."""
        replicas = np.array([sharing.replicas_of(group) for group in groups], np.int64)
        stage, in_stage = sharing.stage_of(rank), rank % sharing.stage_ranks
        is_mine = np.array([group.stage == stage for group in groups], np.bool_)
        shards = in_stage // replicas * sharing.run
        base = sharing.node_of(rank) * sharing.count_node_rows(groups)
        return cls(rank, is_mine, shards, in_stage % replicas, base + shards, sharing.run)

    def find_loaded(self, moves: BlockMoves) -> Mask:
        """Returns of which blocks the rank has a record."""
        mine: Mask = self.is_mine[moves.groups]
        return mine

    def find_written(self, job: SaveJob) -> Mask:
        """Returns of which blocks the rank writes the record."""
        mine = self.find_loaded(job.moves)
        return mine if job.writers is None else mine & (job.writers == self.turns[job.moves.groups])

    def find_digested(self, job: SaveJob) -> Mask:
        """Returns of which blocks the rank reports a digest: those that it writes, and those that are compared."""
        written = self.find_written(job)
        return written if job.compared is None else written | (job.compared & self.find_loaded(job.moves))

    def read_digests(self, reported: bytes, records: int) -> npt.NDArray[np.uint64] | None:
        """Reads two words for each shard of each record. None: `reported` has another length."""
        if len(reported) != _DIGEST_BYTES * records * self.run:
            return None
        return np.frombuffer(reported, np.uint64).reshape(records, self.run, 2)
