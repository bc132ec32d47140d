"""What crosses between the scheduler side and the worker side: plain, frozen values, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvoffload.cache import GroupRule


class BlockMove(NamedTuple):
    """One block of the engine and the slot of its record."""

    group: int
    block: int
    slot: int


@dataclass(frozen=True)
class LoadJob:
    """Records to blocks. `request_id` is reported when every byte is there or the job has failed."""

    request_id: str
    moves: tuple[BlockMove, ...]
    is_doomed: bool = False
    """The scheduler side could not plan it after it was reported: fail it, so that the request is recomputed."""


@dataclass(frozen=True)
class SaveJob:
    """Blocks to records. The source blocks are pinned until every rank has reported `job`."""

    job: int
    moves: tuple[BlockMove, ...]


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """One step's work for every worker. `drops` are slots that no earlier or later job reads."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Save jobs that ranks have ended since the last report: how many ranks did each, and which failed anywhere."""

    saved: Mapping[int, int] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The two ranks' reports as one. Neither is changed: vLLM may still hold them."""
        assert isinstance(other, WorkerReport)
        saved = dict(self.saved)
        for job, ranks in other.saved.items():
            saved[job] = saved.get(job, 0) + ranks
        return WorkerReport(saved, self.failed | other.failed)


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """What the scheduler side must know of a group; it comes from the workers, who see every layer's own spec.

    `index` is the group's position in the engine's block tables.
    """

    index: int
    name: str
    rule: GroupRule
    record_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """A rank's word at start-up. All ranks must agree in everything but their record bytes."""

    fingerprint: bytes
    description: Mapping[str, object]
    """`Identity.describe()`: what a disagreement is explained with."""
    groups: tuple[GroupFacts, ...]
    num_blocks: int
