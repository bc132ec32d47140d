"""The plain, frozen values that cross between the scheduler side and the worker side; nothing else does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvoffload.cache import GroupRule
from kvoffload.connector.common.orders import NodeOrders, NodeReport


class Place(NamedTuple):
    """A server's memory, and the session in it to which an engine's leases and slots belong."""

    memory_id: int
    session: int


GroupKey = tuple[int, int]
"""A group of the session: its position in the engine's block tables, and its stage."""

UNASKED = 0
"""The number with which a rank reports, without being asked, that its weights have changed between two steps."""


class WeightDigests(NamedTuple):
    """Digests of a sample of the weights with which a rank computes."""

    name: bytes = b""
    """Digest of the weights that are equal in engines that may share: part of the engine's name. Empty: not
    readable."""
    proof: bytes = b""
    """Digest of all weights: equal ones prove that the weights are the same. Empty: some cannot be read."""


@dataclass(frozen=True, eq=False)
class BlockMoves:
    """Parallel arrays: blocks of the engine and the slots of their records. `groups` numbers the session's groups."""

    groups: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    """Addresses of the slots in the job's memory, where all shards of a group's block lie one behind the other. If the
    engine is on several nodes, the array has a column for each."""

    def take_node(self, node: int) -> BlockMoves:
        """Returns the same blocks with the addresses of one node."""
        return BlockMoves(self.groups, self.blocks, np.ascontiguousarray(self.addresses[:, node]))

    def __len__(self) -> int:
        return len(self.blocks)

    def choose(self, mask: npt.NDArray[np.bool_]) -> BlockMoves:
        """Returns the moves that `mask` selects, in their order."""
        if mask.all():
            return self
        return BlockMoves(self.groups[mask], self.blocks[mask], self.addresses[mask])


@dataclass(frozen=True, eq=False)
class WantedDigests:
    """The names of loaded records, and the digests with which they were saved, by shard: records are checked by
    them."""

    hashes: bytes
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class LoadJob:
    """Copies records to blocks. `request_id` is reported when every byte is there or the job has failed."""

    request_id: str
    place: Place
    moves: BlockMoves
    wanted: WantedDigests | None = None
    places: tuple[Place, ...] = ()
    """The place on each node, if the engine is on several; `place` is the scheduler side's name for all together."""

    def take_node(self, node: int, shards: slice) -> LoadJob:
        """Returns a node's part of the job, for its own memory and its shards among those of the engine."""
        wanted = self.wanted and WantedDigests(self.wanted.hashes, self.wanted.digests[shards])
        return LoadJob(self.request_id, self.places[node], self.moves.take_node(node), wanted)


@dataclass(frozen=True, eq=False)
class SaveJob:
    """Copies blocks to records. The source blocks are pinned until every rank has reported `job`."""

    job: int
    place: Place
    moves: BlockMoves
    writers: npt.NDArray[np.uint8] | None = None
    """For each move, which of the ranks that hold the same bytes writes the record. None: no two ranks do."""
    compared: npt.NDArray[np.bool_] | None = None
    """The moves of which all ranks that hold the same bytes make digests. None: only ranks that write do."""
    places: tuple[Place, ...] = ()
    """The place on each node, like `LoadJob.places`."""

    def take_node(self, node: int) -> SaveJob:
        """Returns a node's part of the job."""
        return replace(self, place=self.places[node], moves=self.moves.take_node(node), places=())


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """One step's work for every worker."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    doomed: tuple[str, ...] = ()
    """Requests whose hit was reported and could not be planned: they are reported as failed, and recomputed."""
    retired: tuple[int, ...] = ()
    """Memories that no job uses any more."""
    has_forward: bool = False
    """Whether the step computes tokens. Not every model runner tells workers that."""
    step: int = 0
    """A number that every rank reports when this step has ended; 0: the step is not measured."""
    sample: int = 0
    """A number with which every rank reports a proof of the weights that this step uses; 0: no proof is wanted."""
    apart: tuple[GroupKey, ...] = ()
    """Groups of which every rank stores its own bytes from now on, in another session. No job is on its way then."""
    nodes: Mapping[int, NodeOrders] = field(default_factory=dict)
    """Orders for nodes, by number, if the engine has several."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan has no work. The step may still be measured."""
        return not (self.loads or self.saves or self.doomed or self.retired or self.apart or self.nodes)


NOTHING_TO_DO = StepPlan()
ONLY_A_FORWARD = StepPlan(has_forward=True)
"""The plan of a step that computes tokens and has no work for us."""


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The events on some ranks since their last report."""

    saved: Mapping[int, int] = field(default_factory=dict)
    """Number of ranks that have ended each save job, by job."""
    failed: frozenset[int] = frozenset()
    """The jobs of `saved` that failed on any rank."""
    digests: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    """The digest sums, two 64-bit halves each, of the records that a rank made them of, in the job's order; by job and
    rank."""
    places: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)
    """Where ranks may copy, by rank, for ranks where that has changed."""
    copied_s: Mapping[str, float] = field(default_factory=dict)
    """How long the copy of each successful load ran on the slowest of these ranks, in seconds, by request."""
    step: int = 0
    """The number of the step that has ended; 0: its plan had none."""
    weights: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    """The number with which the plan asked, and the proof of the rank's weights, by rank."""
    nodes: Mapping[int, NodeReport] = field(default_factory=dict)
    """Reports of nodes about their servers, by the node's number, if the engine has several."""

    @property
    def is_empty(self) -> bool:
        return not (self.saved or self.places or self.copied_s or self.step or self.weights or self.nodes)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Returns the two reports as one. Neither is changed: vLLM may still hold them."""
        assert isinstance(other, WorkerReport)
        saved = dict(self.saved)
        for job, ranks in other.saved.items():
            saved[job] = saved.get(job, 0) + ranks
        digests = {job: dict(by_rank) for job, by_rank in self.digests.items()}
        for job, by_rank in other.digests.items():
            digests.setdefault(job, {}).update(by_rank)
        copied_s = self.copied_s
        if other.copied_s:
            slowest = {name: max(s, copied_s.get(name, 0.0)) for name, s in other.copied_s.items()}
            copied_s = {**copied_s, **slowest}
        return WorkerReport(
            saved,
            self.failed | other.failed,
            digests,
            {**self.places, **other.places},
            copied_s,
            max(self.step, other.step),
            {**self.weights, **other.weights} if other.weights else self.weights,
            _add_reports(self.nodes, other.nodes) if other.nodes else self.nodes,
        )


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """The facts about a group for the scheduler side; they come from the workers, who see every layer's own spec.

    `index` is the group's position in the engine's block tables.
    """

    index: int
    name: str
    rule: GroupRule
    record_bytes: int
    """Size of the record of one rank of the stage."""
    replicas: int = 1
    """Number of tensor ranks in a row that hold the same bytes of it."""
    stage: int = 0
    """The stage of the pipeline to which its layers belong."""

    @property
    def key(self) -> GroupKey:
        return self.index, self.stage


def store_apart(groups: Sequence[GroupFacts], apart: Collection[GroupKey]) -> tuple[GroupFacts, ...]:
    """Returns the groups, with those in `apart` changed so that every rank stores its own bytes of them."""
    return tuple(replace(one, replicas=1) if one.key in apart else one for one in groups)


@dataclass(frozen=True, kw_only=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """A rank's registration at start-up. All ranks of a stage must agree in all of it, and all stages in the rules of
    the groups that they have in common."""

    rank: int
    fingerprint: bytes
    description: Mapping[str, object]
    """The result of `Identity.describe()`, with which a disagreement is explained."""
    groups: tuple[GroupFacts, ...]
    num_blocks: int
    cache_bytes: int
    """Size of the engine's own cache on this rank."""
    claims: tuple[tuple[str, int], ...] = ()
    """Bytes of its allocations on this rank, by their kind of use."""
    places: tuple[Place, ...] = ()
    """The places where it may copy already."""
    weights: WeightDigests = WeightDigests()  # noqa: RUF009  (a frozen value)
    node_report: NodeReport | None = None
    """The first report of another node than the scheduler side's, from its lowest rank; other ranks have None."""


def _add_reports(one: Mapping[int, NodeReport], later: Mapping[int, NodeReport]) -> Mapping[int, NodeReport]:
    return {**one, **{node: one[node].add(report) if node in one else report for node, report in later.items()}}
