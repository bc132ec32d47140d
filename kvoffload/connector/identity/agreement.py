"""What the ranks of an engine registered, as one: they agree, or the engine must not start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType

from kvoffload.cache import CacheGeometry, CacheGroup
from kvoffload.client import add_report_text, describe_blocks
from kvoffload.connector.engine.pipeline import combine_weights, name_pipeline
from kvoffload.connector.step_plan import GroupFacts, WorkerFacts
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.canonical import encode_canonical
from kvoffload.keys.identity import compare_identities
from kvoffload.kvspec import CompletenessReport, HeadUnits
from kvoffload.protocol import IdentityField, Register
from kvoffload.types import Fingerprint

SHOWN_LETTERS = 120
"""Of a part of an identity; of longer ones a digest is told."""
Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


@dataclass(frozen=True, kw_only=True)
class SharingTerms:
    """How the ranks of an engine divide a block, and how its names are made."""

    hash_block_size: int
    hash_algorithm: str
    hash_seed: str
    tensor_ranks: int
    pipeline_ranks: int = 1
    replicas: int = 1
    """Tensor ranks in a row that hold the same bytes."""
    units: HeadUnits | None = None
    """They are the shards of a block, in engines of every tensor-parallel size. None: each rank's part is one."""

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    @property
    def shards(self) -> int:
        """Parts of a block that are saved and checked each by itself."""
        return self.ranks // self.replicas if self.units is None else self.units.count

    def shards_held_by(self, rank: int) -> range:
        """Those that a rank holds, in a row."""
        if self.units is not None:
            return self.units.of_rank(rank)
        return range(rank // self.replicas, rank // self.replicas + 1)

    def is_writer(self, rank: int) -> bool:
        """Of the ranks that hold the same shards, the one that saves them."""
        return rank % self.replicas == 0


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Says what all ranks together registered."""

    fingerprint: Fingerprint
    description: Mapping[str, object]
    groups: tuple[GroupFacts, ...]
    """With the largest record of any rank: those of a pipeline hold different layers."""
    num_blocks: int
    cache_bytes: int


def agree(facts: Mapping[Rank, WorkerFacts], terms: SharingTerms) -> EngineFacts:
    """Raises what the ranks differ in."""
    if len(facts) != terms.ranks:
        raise UnsupportedError(
            f"{len(facts)} of {terms.ranks} ranks registered KV caches",
            remedy="run all ranks of an engine on one machine",
        )
    ordered = sorted(facts.items())
    (first_rank, first), others = ordered[0], ordered[1:]
    firsts = {first_rank[0]: (first_rank, first)}
    for rank, other in others:
        stage_rank, stage = firsts.setdefault(rank[0], (rank, other))
        if other.fingerprint != stage.fingerprint:
            differences = compare_identities(stage.description, other.description)  # type: ignore[arg-type]
            raise IdentityError(
                f"ranks {stage_rank} and {rank} differ in {'; '.join(map(str, differences))}",
                remedy="start all ranks with the same model and settings",
            )
        if [(group.index, group.rule) for group in other.groups] != [(g.index, g.rule) for g in first.groups]:
            raise IdentityError(
                f"ranks {first_rank} and {rank} have different KV cache groups",
                remedy="start all ranks with the same model and settings",
            )
    record_bytes = [max(rank.groups[i].record_bytes for rank in facts.values()) for i in range(len(first.groups))]
    weights = combine_weights([rank.weights.name for _, rank in ordered])
    return EngineFacts(
        fingerprint=name_pipeline([stage.fingerprint for _, (_, stage) in sorted(firsts.items())], weights),
        description=describe_weights(first.description, weights),
        groups=tuple(replace(g, record_bytes=size) for g, size in zip(first.groups, record_bytes, strict=True)),
        num_blocks=first.num_blocks,
        cache_bytes=sum(rank.cache_bytes for rank in facts.values()),
    )


def describe_weights(description: Mapping[str, object], weights: bytes) -> Mapping[str, object]:
    """What people are told of an engine, with the weights that all its ranks have in memory, if they are known."""
    return {**description, "weights": weights.hex()} if weights else description


def refuse_changes(former: Mapping[Rank, WorkerFacts], facts: Mapping[Rank, WorkerFacts]) -> None:
    """Raises where ranks of a running engine register something else than they did. Where they may copy may change."""
    changed = [rank for rank in sorted({*former, *facts}) if _find_fixed(former, rank) != _find_fixed(facts, rank)]
    if changed:
        raise IdentityError(
            f"rank {changed[0]} woke with other KV caches than it had ({len(changed)} of {len(former)} ranks)",
            remedy="start the engine anew",
        )


def _find_fixed(facts: Mapping[Rank, WorkerFacts], rank: Rank) -> tuple[object, ...]:
    one = facts.get(rank)
    return () if one is None else (one.rank, one.fingerprint, one.groups, one.num_blocks, one.cache_bytes)


def make_register(
    fingerprint: bytes,
    groups: tuple[GroupFacts, ...],
    terms: SharingTerms,
    *,
    description: Mapping[str, object] = MappingProxyType({}),
    rank: int = 0,
    tenant: str = "",
) -> Register:
    """What a process of the engine tells its server. `description`: of its identity."""
    geometry = CacheGeometry(
        hash_block_size=terms.hash_block_size,
        groups=tuple(
            CacheGroup(rule=group.rule, record_bytes=group.record_bytes, shards=terms.shards) for group in groups
        ),
    )
    return describe_blocks(
        Fingerprint(fingerprint),
        geometry,
        hash_algorithm=terms.hash_algorithm,
        hash_seed=sha256(terms.hash_seed.encode()).digest(),
        rank=rank,
        ranks=terms.ranks,
        tenant=tenant,
        # Stages of a pipeline differ.
        identity=_describe_parts(description) if terms.pipeline_ranks == 1 else (),
    )


def add_report(register: Register, report: CompletenessReport, rank: int) -> Register:
    """With what this rank found in its engine's memory, for people."""
    return replace(add_report_text(register, str(report)), rank=rank)


def _describe_parts(description: Mapping[str, object]) -> tuple[IdentityField, ...]:
    """Describes the parts by name; of what is long, it returns a digest."""
    return tuple(IdentityField(name=name, value=_shorten(value)) for name, value in description.items())


def _shorten(value: object) -> str:
    if isinstance(value, int | str) and len(str(value)) <= SHOWN_LETTERS and str(value).isprintable():
        return str(value)
    return sha256(encode_canonical(value)).hexdigest()  # type: ignore[arg-type]
