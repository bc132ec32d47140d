"""What crosses between the scheduler side and the worker side: plain, frozen values, and nothing else."""

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
from kvoffload.connector.nodes.orders import NodeOrders, NodeReport


class Place(NamedTuple):
    """A server's memory, and the session in it that an engine's leases and slots belong to."""

    memory_id: int
    session: int


GroupKey = tuple[int, int]
"""A group of the session: its position in the engine's block tables, and its stage."""

UNASKED = 0
"""With which a rank reports that its weights have changed between two steps."""


class WeightDigests(NamedTuple):
    """Of a sample of the weights that a rank computes with."""

    name: bytes = b""
    """Of what engines have in common that may share: it goes into the engine's name. Empty: nobody could look."""
    proof: bytes = b""
    """Of all; equal ones prove that the weights are the same. Empty: some cannot be seen."""


@dataclass(frozen=True, eq=False)
class BlockMoves:
    """Parallel arrays: blocks of the engine and the slots of their records. `groups` counts the session's groups."""

    groups: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    """In the memory of the job; all shards of a group's block lie there one behind the other. Of an engine on several
    nodes with a column for each."""

    def take_node(self, node: int) -> BlockMoves:
        """Returns the same blocks with the addresses of one node."""
        return BlockMoves(self.groups, self.blocks, np.ascontiguousarray(self.addresses[:, node]))

    def __len__(self) -> int:
        return len(self.blocks)

    def choose(self, mask: npt.NDArray[np.bool_]) -> BlockMoves:
        """Some of them, in their order."""
        if mask.all():
            return self
        return BlockMoves(self.groups[mask], self.blocks[mask], self.addresses[mask])


@dataclass(frozen=True, eq=False)
class WantedDigests:
    """What loaded records are checked against: each one's name, and the digest that it was saved with, by shard."""

    hashes: bytes
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class LoadJob:
    """Records to blocks. `request_id` is reported when every byte is there or the job has failed."""

    request_id: str
    place: Place
    moves: BlockMoves
    wanted: WantedDigests | None = None
    places: tuple[Place, ...] = ()
    """Of an engine on several nodes, one for each; `place` is what the scheduler side calls them together."""

    def take_node(self, node: int, shards: slice) -> LoadJob:
        """Returns a node's part of it: of its own memory, and of its shards among those of the engine."""
        wanted = self.wanted and WantedDigests(self.wanted.hashes, self.wanted.digests[shards])
        return LoadJob(self.request_id, self.places[node], self.moves.take_node(node), wanted)


@dataclass(frozen=True, eq=False)
class SaveJob:
    """Blocks to records. The source blocks are pinned until every rank has reported `job`."""

    job: int
    place: Place
    moves: BlockMoves
    writers: npt.NDArray[np.uint8] | None = None
    """For each move, which of the ranks that hold the same bytes writes the record. None: no ranks do."""
    compared: npt.NDArray[np.bool_] | None = None
    """Records of which all ranks that hold the same bytes make digests. None: those who write alone."""
    places: tuple[Place, ...] = ()
    """As in `LoadJob`."""

    def take_node(self, node: int) -> SaveJob:
        """Returns a node's part of it."""
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
    """The step computes tokens. What a worker is called with does not say so under each model runner."""
    step: int = 0
    """A number that every rank reports with what this step has ended; 0: nobody wants to know."""
    sample: int = 0
    """A number with which every rank reports a proof of the weights that this step computes with; 0: nobody asks."""
    apart: tuple[GroupKey, ...] = ()
    """Groups of which every rank stores its own bytes from here on, in another session. No job is on its way."""
    nodes: Mapping[int, NodeOrders] = field(default_factory=dict)
    """What nodes are told, by number, if the engine has several."""

    @property
    def is_empty(self) -> bool:
        """Nothing is to be done. The step may be one that is measured."""
        return not (self.loads or self.saves or self.doomed or self.retired or self.apart or self.nodes)


NOTHING_TO_DO = StepPlan()
ONLY_A_FORWARD = StepPlan(has_forward=True)
"""Of a step that computes tokens and has nothing for us."""


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks have to say since the last report."""

    saved: Mapping[int, int] = field(default_factory=dict)
    """Save jobs that have ended: how many ranks did each."""
    failed: frozenset[int] = frozenset()
    """Those of them that failed anywhere."""
    digests: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    """By job and rank: two 64-bit halves of the digest sum of each record that it made one of, as the job has them."""
    places: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)
    """By rank, if it has changed: where it may copy."""
    copied_s: Mapping[str, float] = field(default_factory=dict)
    """By request whose load has ended well: how long its copy ran, on the slowest of these ranks."""
    step: int = 0
    """That this is the end of, if its plan had a number."""
    weights: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    """By rank: the number that its plan asked with, and the proof of its weights."""
    nodes: Mapping[int, NodeReport] = field(default_factory=dict)
    """By number: what nodes have to say of their servers, if the engine has several."""

    @property
    def is_empty(self) -> bool:
        return not (self.saved or self.places or self.copied_s or self.step or self.weights or self.nodes)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The two ranks' reports as one. Neither is changed: vLLM may still hold them."""
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
    """What the scheduler side must know of a group; it comes from the workers, who see every layer's own spec.

    `index` is the group's position in the engine's block tables.
    """

    index: int
    name: str
    rule: GroupRule
    record_bytes: int
    """Of one rank of the stage."""
    replicas: int = 1
    """Tensor ranks in a row that hold the same bytes of it."""
    stage: int = 0
    """The stage of the pipeline whose layers it has."""

    @property
    def key(self) -> GroupKey:
        return self.index, self.stage


def store_apart(groups: Sequence[GroupFacts], apart: Collection[GroupKey]) -> tuple[GroupFacts, ...]:
    """Returns the groups with every rank's own bytes stored of some of them."""
    return tuple(replace(one, replicas=1) if one.key in apart else one for one in groups)


@dataclass(frozen=True, kw_only=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """A rank's word at start-up. All ranks of a stage must agree in everything, and all stages in the rules of the
    groups that they have in common."""

    rank: int
    fingerprint: bytes
    description: Mapping[str, object]
    """`Identity.describe()`: what a disagreement is explained with."""
    groups: tuple[GroupFacts, ...]
    num_blocks: int
    cache_bytes: int
    """Of the engine's own cache, on this rank."""
    claims: tuple[tuple[str, int], ...] = ()
    """Bytes of its allocations on this rank, by what they were found to be."""
    places: tuple[Place, ...] = ()
    """Where it may copy already."""
    weights: WeightDigests = WeightDigests()  # noqa: RUF009  (a frozen value)
    node_report: NodeReport | None = None
    """Of the lowest rank of another node than the scheduler side's: how that node stands with its server, and slots."""


def _add_reports(one: Mapping[int, NodeReport], later: Mapping[int, NodeReport]) -> Mapping[int, NodeReport]:
    return {**one, **{node: one[node].add(report) if node in one else report for node, report in later.items()}}
