"""A batch of a remote tier, cut into jobs so that a large one has more than one connection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvoffload.tiers.base import FinishedBatch
from kvoffload.tiers.remote_job import RemoteJob


class RemoteBatch:
    """Ends when the last of its jobs has."""

    def __init__(self, whole: RemoteJob, *, connections: int, call_bytes: int) -> None:
        self.jobs: Sequence[RemoteJob] = _cut(whole, connections, call_bytes)
        self._ended: dict[RemoteJob, FinishedBatch] = {}

    def take(self, job: RemoteJob, ended: FinishedBatch) -> FinishedBatch | None:
        """Takes what one of them has ended with. None: others have not ended. For one thread at a time."""
        self._ended[job] = ended
        if len(self._ended) < len(self.jobs):
            return None
        parts = [self._ended[one] for one in self.jobs]
        if len(parts) == 1:
            return parts[0]
        return FinishedBatch(
            ticket=job.ticket,
            outcomes=np.concatenate([part.outcomes for part in parts]),
            digests=np.concatenate([part.digests for part in parts]),
            parents=b"".join(part.parents for part in parts),
        )


def _cut(whole: RemoteJob, connections: int, call_bytes: int) -> Sequence[RemoteJob]:
    """Where that makes no call smaller than it would be anyway."""
    count = len(whole.batch.names)
    calls = -(-count * whole.batch.record_bytes // call_bytes)
    pieces = max(min(connections, calls, count), 1)
    if pieces == 1:
        return [whole]
    bounds = [count * at // pieces for at in range(pieces + 1)]
    return [
        RemoteJob(whole.ticket, whole.verb, whole.batch.part(slice(first, last)), whole.deadline_s)
        for first, last in pairwise(bounds)
    ]
