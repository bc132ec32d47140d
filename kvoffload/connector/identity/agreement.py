"""What the ranks of an engine registered, as one: they agree, or the engine must not start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import gcd
from types import MappingProxyType

from kvoffload.cache import CacheGeometry, CacheGroup
from kvoffload.client import add_report_text, describe_blocks
from kvoffload.connector.engine.pipeline import combine_weights, name_pipeline
from kvoffload.connector.step_plan import GroupFacts, WorkerFacts
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.canonical import encode_canonical
from kvoffload.keys.identity import compare_identities
from kvoffload.kvspec import CompletenessReport
from kvoffload.protocol import IdentityField, Register
from kvoffload.types import Fingerprint

SHOWN_LETTERS = 120
"""Of a part of an identity; of longer ones a digest is told."""
Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""
_DIVISION_TAG = b"kvoffload division of blocks 1\n"


@dataclass(frozen=True, kw_only=True)
class SharingTerms:
    """How the ranks of an engine divide a block, and how its names are made."""

    hash_block_size: int
    hash_algorithm: str
    hash_seed: str
    tensor_ranks: int
    pipeline_ranks: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    def shards_of(self, group: GroupFacts) -> int:
        """Says how many ranks hold different bytes of a block of this group."""
        return self.ranks // group.replicas


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
        if [group.replicas for group in other.groups] != [group.replicas for group in stage.groups]:
            raise IdentityError(
                f"ranks {stage_rank} and {rank} do not agree which of their KV cache groups hold the same bytes",
                remedy="start all ranks with the same model and settings",
            )
    weights = combine_weights([rank.weights.name for _, rank in ordered])
    stages = [stage for _, (_, stage) in sorted(firsts.items())]
    groups = combine_groups(first.groups, [rank.groups for rank in facts.values()])
    return EngineFacts(
        fingerprint=name_division(name_pipeline([stage.fingerprint for stage in stages], weights), groups),
        description=describe_weights(first.description, weights),
        groups=groups,
        num_blocks=first.num_blocks,
        cache_bytes=sum(rank.cache_bytes for rank in facts.values()),
    )


def combine_groups(groups: Sequence[GroupFacts], ranks: Sequence[Sequence[GroupFacts]]) -> tuple[GroupFacts, ...]:
    """Returns the groups with the largest record of any rank, and as many equal ranks in a row as there are in each."""
    return tuple(
        replace(
            group,
            record_bytes=max(one.record_bytes for one in of_ranks),
            replicas=gcd(*(one.replicas for one in of_ranks)),
        )
        for group, *of_ranks in zip(groups, *ranks, strict=True)
    )


def name_division(name: Fingerprint, groups: Sequence[GroupFacts]) -> Fingerprint:
    """The name of what an engine holds whose ranks store their blocks like this; where each stores its own, as it is.

    Slots of one name are divided alike, whatever a later version finds out about a model.
    """
    replicas = [group.replicas for group in groups]
    if set(replicas) <= {1}:
        return name
    return Fingerprint(sha256(_DIVISION_TAG + name + b"".join(one.to_bytes(4, "little") for one in replicas)).digest())


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
            CacheGroup(rule=group.rule, record_bytes=group.record_bytes, shards=terms.shards_of(group))
            for group in groups
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
