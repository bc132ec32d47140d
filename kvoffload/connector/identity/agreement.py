"""Joins the registrations of an engine's ranks: they agree, or the engine must not start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import gcd
from types import MappingProxyType

from kvoffload.cache import CacheGeometry, CacheGroup
from kvoffload.client import add_report_text, describe_blocks
from kvoffload.connector.common.step_plan import GroupFacts, WorkerFacts
from kvoffload.connector.engine.pipeline import combine_weights, different_groups, join_stages, name_pipeline
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.identity import compare_identities, describe_parts
from kvoffload.kvspec import CompletenessReport, HeadUnits
from kvoffload.protocol import IdentityField, Register
from kvoffload.types import Fingerprint

_NODE_TAG = b"kvoffload node %d of %d\n"
Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""
_DIVISION_TAG = b"kvoffload division of blocks 1\n"


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """How the ranks of an engine divide a block, and how its names are made."""

    hash_block_size: int
    hash_algorithm: str
    hash_seed: str
    tensor_ranks: int
    pipeline_ranks: int = 1
    nodes: int = 1
    """Number of machines with ranks, equally many on each, in their order. Each has a session with its own server."""
    units: HeadUnits | None = None
    """The units that are a block's shards in engines of every tensor-parallel size. None: each rank's part is a
    shard."""

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    @property
    def node_ranks(self) -> int:
        """Number of ranks that share a machine, and its server."""
        return self.ranks // self.nodes

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one stage that share a machine."""
        return min(self.tensor_ranks, self.node_ranks)

    @property
    def may_part(self) -> bool:
        """Whether ranks that hold different bytes where they should hold the same may store them apart, in another
        session: there must be one server, and no units that other engines share."""
        return self.nodes == 1 and self.units is None

    @property
    def run(self) -> int:
        """Number of shards of a block in a row that each rank holds."""
        return 1 if self.units is None else self.units.local

    def node_of(self, rank: int) -> int:
        return rank // self.node_ranks

    def stage_of(self, rank: int) -> int:
        """Returns the number of a rank's stage, among those on its machine."""
        return rank % self.node_ranks // self.stage_ranks

    def replicas_of(self, group: GroupFacts) -> int:
        """Returns how many ranks in a row hold the same bytes of a group and share a machine, since each machine keeps
        the records that its ranks read."""
        return gcd(group.replicas, self.stage_ranks)

    def list_divisions(self, groups: Sequence[GroupFacts]) -> list[int]:
        """Returns, by group, how many ranks store the same bytes, for the engine's name. With units it is always 1, as
        engines of every size share names."""
        return [1 if self.units else self.replicas_of(group) for group in groups]

    def shards_of(self, group: GroupFacts) -> int:
        """Returns how many parts of a block of this group a server keeps, each with a digest of its own."""
        return self.stage_ranks // self.replicas_of(group) * self.run

    def count_node_rows(self, groups: Sequence[GroupFacts]) -> int:
        """Returns how many shards a server keeps of the group that has the most."""
        return max(map(self.shards_of, groups))

    def count_rows(self, groups: Sequence[GroupFacts]) -> int:
        """Returns the same for all servers together, whose shards come one behind the other."""
        return self.nodes * self.count_node_rows(groups)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The registration of all ranks together."""

    fingerprint: Fingerprint
    description: Mapping[str, object]
    groups: tuple[GroupFacts, ...]
    """The session's groups on the scheduler's node; a pipeline has its own for each stage."""
    node_bytes: tuple[tuple[int, ...], ...]
    """Size of one shard of a record in bytes, by node and group. Machines may have stages with other layers."""
    num_blocks: int
    cache_bytes: int


def agree(facts: Mapping[Rank, WorkerFacts], settings: SharingSettings) -> EngineFacts:
    """Joins the ranks' registrations. Raises if they differ, and tells in what."""
    if len(facts) != settings.ranks:
        raise UnsupportedError(
            f"{len(facts)} of {settings.ranks} ranks registered KV caches",
            remedy="run all ranks of an engine on one machine",
        )
    ordered = sorted(facts.items())
    _refuse_apart([one for _, one in ordered], settings)
    first = ordered[0][1]
    firsts: dict[int, tuple[Rank, WorkerFacts]] = {}
    for rank, other in ordered:
        stage_rank, stage = firsts.setdefault(rank[0], (rank, other))
        if other.fingerprint != stage.fingerprint:
            differences = compare_identities(stage.description, other.description)  # type: ignore[arg-type]
            raise IdentityError(
                f"ranks {stage_rank} and {rank} differ in {'; '.join(map(str, differences))}",
                remedy="start all ranks with the same model and settings",
            )
        if other.groups != stage.groups:
            raise different_groups(stage_rank, rank)
    stages = [stage for _, (_, stage) in sorted(firsts.items())]
    weights = combine_weights([rank.weights.name for _, rank in ordered])
    nodes = _join_nodes(stages, settings)
    groups = nodes[0]
    return EngineFacts(
        fingerprint=name_division(
            name_pipeline([stage.fingerprint for stage in stages], weights),
            settings.list_divisions(groups),
        ),
        description=describe_weights(first.description, weights),
        groups=groups,
        node_bytes=tuple(tuple(group.record_bytes for group in of_node) for of_node in nodes),
        num_blocks=first.num_blocks,
        cache_bytes=sum(rank.cache_bytes for rank in facts.values()),
    )


def _join_nodes(stages: Sequence[WorkerFacts], settings: SharingSettings) -> list[tuple[GroupFacts, ...]]:
    """Returns each node's groups. Raises if nodes have different ones."""
    per_node = settings.node_ranks // settings.stage_ranks
    joined = []
    for node in range(settings.nodes):
        first = node * settings.node_ranks // settings.tensor_ranks
        joined.append(join_stages([stage.groups for stage in stages[first : first + per_node]]))
    kinds = [[(one.key, one.rule, one.replicas) for one in groups] for groups in joined]
    for node, of_node in enumerate(kinds):
        if of_node != kinds[0]:
            raise IdentityError(
                f"the layers on machines 0 and {node} of this engine are of different KV cache groups",
                remedy="give each machine stages with layers of all kinds, or keep the engine on one machine",
            )
    return joined


def name_division(name: Fingerprint, replicas: Sequence[int]) -> Fingerprint:
    """Adds to an engine's name how many ranks store the same bytes of each group; unchanged if each stores its own.

    So slots under one name are always divided alike, even if a later version finds more equal ranks in a model.
    """
    if set(replicas) <= {1}:
        return name
    return Fingerprint(sha256(_DIVISION_TAG + name + b"".join(one.to_bytes(4, "little") for one in replicas)).digest())


def _refuse_apart(ranks: Sequence[WorkerFacts], settings: SharingSettings) -> None:
    """Raises if ranks that should be on one machine have joined no memory in common."""
    for node in range(settings.nodes):
        mine = ranks[node * settings.node_ranks : (node + 1) * settings.node_ranks]
        memories = [{place.memory_id for place in one.places} for one in mine]
        if all(memories) and not set.intersection(*memories):
            raise UnsupportedError(
                f"ranks {mine[0].rank} to {mine[-1].rank} are on one machine and have no server in common",
                remedy="give them the same `server`, or the same folder for temporary files if the server is private",
            )


def name_node(fingerprint: bytes, node: int, nodes: int) -> Fingerprint:
    """Returns the name of one node's records. A server uses its own shard numbers in digests and keys, so no two nodes
    may use the same name."""
    name = fingerprint if nodes == 1 else sha256(_NODE_TAG % (node, nodes) + fingerprint).digest()
    return Fingerprint(name)


def describe_weights(description: Mapping[str, object], weights: bytes) -> Mapping[str, object]:
    """Adds the digest of all ranks' weights to an engine's description, if it is known."""
    return {**description, "weights": weights.hex()} if weights else description


def refuse_changes(former: Mapping[Rank, WorkerFacts], facts: Mapping[Rank, WorkerFacts]) -> None:
    """Raises if ranks of a running engine register something else than before. The places where they may copy may
    change."""
    changed = [rank for rank in sorted({*former, *facts}) if _find_fixed(former, rank) != _find_fixed(facts, rank)]
    if changed:
        raise IdentityError(
            f"rank {changed[0]} woke with other KV caches than it had ({len(changed)} of {len(former)} ranks)",
            remedy="restart the engine",
        )


def _find_fixed(facts: Mapping[Rank, WorkerFacts], rank: Rank) -> tuple[object, ...]:
    one = facts.get(rank)
    return () if one is None else (one.rank, one.fingerprint, one.groups, one.num_blocks, one.cache_bytes)


def make_register(
    fingerprint: bytes,
    groups: tuple[GroupFacts, ...],
    settings: SharingSettings,
    *,
    description: Mapping[str, object] = MappingProxyType({}),
    rank: int = 0,
    tenant: str = "",
) -> Register:
    """Makes the registration of an engine's process with its server. `description` is its first stage's identity."""
    geometry = CacheGeometry(
        hash_block_size=settings.hash_block_size,
        groups=tuple(
            CacheGroup(rule=group.rule, record_bytes=group.record_bytes, shards=settings.shards_of(group))
            for group in groups
        ),
    )
    return describe_blocks(
        Fingerprint(fingerprint),
        geometry,
        hash_algorithm=settings.hash_algorithm,
        hash_seed=sha256(settings.hash_seed.encode()).digest(),
        rank=rank,
        ranks=settings.ranks,
        tenant=tenant,
        identity=tuple(
            IdentityField(name=name, value=value)
            for name, value in describe_parts(
                {**description, "stages": settings.pipeline_ranks} if settings.pipeline_ranks > 1 else description
            ).items()
        ),
    )


def add_report(register: Register, report: CompletenessReport, rank: int) -> Register:
    """Adds a readable report of what this rank found in its engine's memory."""
    return replace(add_report_text(register, str(report)), rank=rank)
