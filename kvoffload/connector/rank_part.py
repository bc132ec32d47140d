"""What one rank has of an engine's blocks: which shard of each group, and which records it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.connector.step_plan import GroupFacts, SaveJob

Mask = npt.NDArray[np.bool_]
"""A truth for each move of a job."""


@dataclass(frozen=True, eq=False)
class RankPart:
    """Of the ranks that hold a shard, the hash of a block chooses the one that writes it: so all their links carry
    load. Workers and the scheduler side make the same value for a rank."""

    rank: int
    shards: npt.NDArray[np.int64]
    """By group: the shard that it holds."""
    turns: npt.NDArray[np.int64]
    """By group: its number among the ranks that hold this shard."""

    @classmethod
    def find(cls, rank: int, groups: Sequence[GroupFacts]) -> RankPart:
        """Returns the part of a rank, of all ranks of the engine counted from 0."""
        replicas = np.array([group.replicas for group in groups], np.int64)
        return cls(rank, rank // replicas, rank % replicas)

    def find_written(self, job: SaveJob) -> Mask:
        """Says of which blocks it writes the record."""
        if job.writers is None:
            return np.ones(len(job.moves), np.bool_)
        written: Mask = job.writers == self.turns[job.moves.groups]
        return written

    def find_digested(self, job: SaveJob) -> Mask:
        """Says of which blocks it reports a digest: what it writes, and what it compares with the one who does."""
        written = self.find_written(job)
        return written if job.compared is None else written | job.compared
