"""Ranks that agree are one engine; the others do not start."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from tests.kit.connector.facts import GROUPS, facts

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.step_plan import GroupFacts, Place, WeightDigests
from kvoffload.connector.engine.pipeline import combine_weights, name_pipeline
from kvoffload.connector.identity.agreement import (
    SharingSettings,
    add_report,
    agree,
    make_register,
    name_node,
)
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.kvspec import AllocationReport, CompletenessReport, HeadUnits
from kvoffload.protocol.limits import MAX_REPORT
from kvoffload.types import ReuseRule


def settings(**changes: Any) -> SharingSettings:
    given = {"hash_block_size": 4, "hash_algorithm": "sha256", "hash_seed": "7", "tensor_ranks": 1}
    return SharingSettings(**{**given, **changes})


def halved(*replicas: int) -> tuple[GroupFacts, ...]:
    return tuple(replace(group, replicas=count) for group, count in zip(GROUPS, replicas, strict=True))


def rows_of(sharing: SharingSettings, groups: tuple[GroupFacts, ...]) -> list[list[int]]:
    """The shards that each rank holds of its stage's first group, among those of all servers."""
    found = []
    for rank in range(sharing.ranks):
        part = RankPart.find(rank, groups, sharing)
        first = int(part.rows[part.is_mine.argmax()])
        found.append(list(range(first, first + part.run)))
    return found


# ---- ranks ----


@pytest.mark.parametrize(
    ("tensor", "pipeline", "nodes", "replicas", "held"),
    [
        (1, 1, 1, 1, [0]),
        (2, 1, 1, 1, [0, 1]),
        (4, 1, 1, 2, [0, 0, 1, 1]),
        (4, 1, 1, 4, [0, 0, 0, 0]),
        (2, 2, 1, 2, [0, 0, 0, 0]),
        (2, 2, 1, 1, [0, 1, 0, 1]),
        (4, 1, 2, 1, [0, 1, 2, 3]),
        (4, 1, 2, 2, [0, 0, 1, 1]),
        (4, 1, 2, 4, [0, 0, 1, 1]),  # Both machines keep the bytes that ranks on both hold.
        (2, 2, 2, 1, [0, 1, 2, 3]),
        (2, 2, 2, 2, [0, 0, 1, 1]),
        (2, 4, 2, 1, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_each_stage_divides_a_block_among_its_ranks_and_each_machine_keeps_its_own(
    tensor: int, pipeline: int, nodes: int, replicas: int, held: list[int]
) -> None:
    sharing = settings(tensor_ranks=tensor, pipeline_ranks=pipeline, nodes=nodes)
    stages = range(max(pipeline // nodes, 1))
    groups = tuple(replace(GROUPS[0], replicas=replicas, stage=stage) for stage in stages)
    assert rows_of(sharing, groups) == [[shard] for shard in held]
    assert sharing.count_rows(groups) == len(set(held))
    assert {sharing.shards_of(group) for group in groups} == {len(set(held)) // nodes}


def test_stages_and_machines_are_counted_from_the_first_rank() -> None:
    sharing = settings(tensor_ranks=2, pipeline_ranks=4, nodes=2)
    assert [sharing.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [sharing.stage_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    parted = settings(tensor_ranks=4, pipeline_ranks=2, nodes=4)
    assert [parted.node_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {parted.stage_of(rank) for rank in range(8)} == {0}


@pytest.mark.parametrize(
    ("heads", "tensor", "shards"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_units_are_the_shards_of_engines_of_every_size(heads: int, tensor: int, shards: list[list[int]]) -> None:
    units = HeadUnits(heads=heads, ranks=tensor)
    sharing, groups = settings(tensor_ranks=tensor, units=units), halved(units.replicas, units.replicas)
    assert rows_of(sharing, groups) == shards
    register = make_register(b"f" * 32, groups, sharing)
    assert (sharing.count_rows(groups), register.ranks) == (heads, tensor)
    assert {group.shards for group in register.groups} == {heads}
    # They find each other's blocks: how many ranks hold a unit is in no name.
    engine = agree({(0, rank): facts(rank, groups=groups) for rank in range(tensor)}, sharing)
    assert engine.fingerprint == b"f" * 32


@pytest.mark.parametrize(
    ("changes", "may_part"),
    [({}, True), ({"nodes": 2}, False), ({"units": HeadUnits(heads=2, ranks=2)}, False)],
)
def test_ranks_store_apart_where_nobody_else_divides_blocks_as_they_did(
    changes: dict[str, Any], may_part: bool
) -> None:
    assert settings(tensor_ranks=2, **changes).may_part == may_part


# ---- agreement ----


def test_one_rank_is_an_engine() -> None:
    engine = agree({(0, 0): facts()}, settings())
    assert (engine.fingerprint, engine.groups, engine.num_blocks, engine.cache_bytes) == (b"f" * 32, GROUPS, 8, 1000)


def test_a_missing_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="1 of 2 ranks"):
        agree({(0, 0): facts()}, settings(tensor_ranks=2))


def test_ranks_of_different_identity_are_refused_by_the_field_they_differ_in() -> None:
    other = facts(1, fingerprint=b"g" * 32, description={"model": "acme/other"})
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\).*model: 'acme/tiny' here, 'acme/other' there"):
        agree({(0, 0): facts(), (0, 1): other}, settings(tensor_ranks=2))


@pytest.mark.parametrize("groups", [tuple(reversed(GROUPS)), GROUPS[:1], (GROUPS[0], replace(GROUPS[1], index=3))])
def test_ranks_with_different_groups_are_refused(groups: Any) -> None:
    with pytest.raises(IdentityError, match="different KV cache groups"):
        agree({(0, 0): facts(), (0, 1): facts(1, groups=groups)}, settings(tensor_ranks=2))


def test_ranks_of_a_pipeline_differ_and_the_ranks_of_a_stage_do_not() -> None:
    """Each has layers of its own; all that they hold together has one name, whatever order they came in."""
    sharing = settings(tensor_ranks=2, pipeline_ranks=2)
    larger = (replace(GROUPS[0], record_bytes=100),)
    ranks = {
        (stage, rank): facts(
            2 * stage + rank, fingerprint=b"fg"[stage : stage + 1] * 32, groups=(GROUPS, larger)[stage]
        )
        for stage in range(2)
        for rank in range(2)
    }
    engine = agree(ranks, sharing)
    assert engine == agree(dict(reversed(ranks.items())), sharing)
    assert engine.fingerprint == name_pipeline([b"f" * 32, b"g" * 32])
    assert engine.groups == (GROUPS[0], replace(larger[0], stage=1), GROUPS[1])
    assert engine.cache_bytes == 4000
    ranks[1, 1] = facts(3, fingerprint=b"h" * 32, groups=larger, description={"model": "acme/other"})
    with pytest.raises(IdentityError, match=r"\(1, 0\) and \(1, 1\)"):
        agree(ranks, sharing)


def test_ranks_of_which_some_hold_the_same_bytes_are_another_engine_than_ranks_that_store_apart() -> None:
    sharing = settings(tensor_ranks=2)
    engines = [
        agree({(0, rank): facts(rank, groups=halved(*replicas)) for rank in range(2)}, sharing)
        for replicas in ((1, 1), (2, 1), (1, 2), (2, 2))
    ]
    assert engines[0].fingerprint == b"f" * 32
    assert len({engine.fingerprint for engine in engines}) == 4
    register = make_register(engines[1].fingerprint, engines[1].groups, sharing)
    assert [group.shards for group in register.groups] == [1, 2]


def test_ranks_that_do_not_agree_on_what_they_have_in_common_are_refused() -> None:
    ranks = {(0, 0): facts(groups=halved(2, 1)), (0, 1): facts(1, groups=halved(1, 1))}
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\) have different KV cache groups"):
        agree(ranks, settings(tensor_ranks=2))


def test_each_stage_has_equal_ranks_of_its_own() -> None:
    sharing = settings(tensor_ranks=4, pipeline_ranks=2)
    ranks = {
        (stage, rank): facts(4 * stage + rank, groups=(halved(4, 2), halved(2, 1))[stage])
        for stage in range(2)
        for rank in range(4)
    }
    engine = agree(ranks, sharing)
    assert [(group.index, group.stage, group.replicas) for group in engine.groups] == [
        (0, 0, 4),
        (0, 1, 2),
        (2, 0, 2),
        (2, 1, 1),
    ]
    assert [sharing.shards_of(group) for group in engine.groups] == [1, 2, 2, 4]


def test_ranks_of_a_stage_with_records_of_other_sizes_are_refused() -> None:
    other = facts(1, groups=(GROUPS[0], replace(GROUPS[1], record_bytes=65)))
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\) have different KV cache groups"):
        agree({(0, 0): facts(), (0, 1): other}, settings(tensor_ranks=2))


def test_another_division_of_the_same_layers_is_another_engine() -> None:
    sharing = settings(pipeline_ranks=2)
    one, other = ((b"f", b"g"), (b"g", b"f"))
    engines = [
        agree({(stage, 0): facts(stage, fingerprint=name * 32) for stage, name in enumerate(names)}, sharing)
        for names in (one, other)
    ]
    assert engines[0].fingerprint != engines[1].fingerprint


def test_ranks_that_know_their_weights_are_an_engine_of_these_weights() -> None:
    sharing = settings(tensor_ranks=2)
    plain = agree({(0, rank): facts(rank) for rank in range(2)}, sharing)
    ranks = {(0, rank): facts(rank, weights=WeightDigests(b"vw"[rank : rank + 1] * 32, b"")) for rank in range(2)}
    engine = agree(ranks, sharing)
    together = combine_weights([b"v" * 32, b"w" * 32])
    assert engine.fingerprint == name_pipeline([b"f" * 32], together) != plain.fingerprint
    assert engine.description == {"model": "acme/tiny", "weights": together.hex()}
    ranks[0, 1] = facts(1, weights=WeightDigests(b"x" * 32, b""))
    assert agree(ranks, sharing).fingerprint not in (engine.fingerprint, plain.fingerprint)
    ranks[0, 1] = facts(1)  # who cannot look
    assert agree(ranks, sharing) == plain


# ---- what a server is told ----


def test_a_server_is_told_every_rule_and_never_the_seed() -> None:
    register = make_register(b"f" * 32, halved(2, 1), settings(tensor_ranks=4), rank=3, tenant="acme")
    assert register.fingerprint == b"f" * 32
    assert (register.rank, register.ranks, register.tenant) == (3, 4, "acme")
    assert (register.hash_block_size, register.hash_algorithm) == (4, "sha256")
    assert register.hash_seed == sha256(b"7").digest()
    assert [(group.record_bytes, group.block_size, group.window, group.shards) for group in register.groups] == [
        (64, 4, 0, 2),
        (64, 8, 6, 4),
    ]
    assert [group.reuse for group in register.groups] == [ReuseRule.PREFIX, ReuseRule.WINDOW]


def test_of_a_pipeline_the_first_stage_and_the_number_of_stages_are_described() -> None:
    sharing = settings(pipeline_ranks=2)
    engine = agree(
        {(stage, 0): facts(stage, description={"model": "acme/tiny", "layers": f"of {stage}"}) for stage in range(2)},
        sharing,
    )
    register = make_register(engine.fingerprint, engine.groups, sharing, description=engine.description)
    assert {part.name: part.value for part in register.identity} == {
        "model": "acme/tiny",
        "layers": "of 0",
        "stages": "2",
    }
    assert [(group.record_bytes, group.shards) for group in register.groups] == [(64, 1)] * 4


def test_all_processes_of_an_engine_tell_the_same_but_their_rank() -> None:
    """Any other difference would be refused."""
    sharing = settings(tensor_ranks=2)
    engine = agree({(0, rank): facts(rank) for rank in range(2)}, sharing)
    of_scheduler = make_register(engine.fingerprint, engine.groups, sharing)
    for rank in range(2):
        of_worker = make_register(b"f" * 32, GROUPS, sharing, rank=rank)
        assert replace(of_worker, rank=0) == of_scheduler


def test_a_report_goes_with_it_as_far_as_it_fits() -> None:
    register = make_register(b"f" * 32, GROUPS, settings(tensor_ranks=2))
    rows = tuple((f"model.layers.{at}.self_attn", 64) for at in range(3000))
    allocation = AllocationReport(
        name="kv",
        size_bytes=3000 * 64,
        page_bytes=3000 * 64,
        excluded_bytes=0,
        padding_bytes=0,
        layers=rows,
        exclusions=(),
    )
    told = add_report(register, CompletenessReport(num_blocks=1, allocations=(allocation,)), rank=1)
    assert (told.rank, replace(told, rank=0, report=b"")) == (1, register)
    lines = told.report.decode().splitlines()
    assert lines[0] == "1 blocks, 1 allocations, every byte accounted for"
    assert lines[2].split() == ["model.layers.0.self_attn", "64", "B"]
    assert MAX_REPORT - 100 < len(told.report) <= MAX_REPORT
    assert lines[-1].endswith("64 B")


# ---- several machines ----


def on(*memories: int) -> dict[str, Any]:
    return {"places": tuple(Place(memory_id, 1) for memory_id in memories)}


def test_ranks_of_one_machine_must_have_a_server_in_common() -> None:
    sharing = settings(tensor_ranks=4, nodes=2)
    ranks = {(0, rank): facts(rank, **on(memory)) for rank, memory in enumerate((5, 5, 6, 6))}
    assert agree(ranks, sharing).fingerprint == b"f" * 32
    ranks[0, 3] = facts(3, **on(7))
    with pytest.raises(UnsupportedError, match="ranks 2 to 3 are on one machine and have no server in common"):
        agree(ranks, sharing)
    for joined in (on(7, 6), on()):
        agree({**ranks, (0, 3): facts(3, **joined)}, sharing)


def test_what_each_machine_keeps_has_a_name_of_its_own() -> None:
    name = b"f" * 32
    names = {name_node(name, node, nodes) for nodes in (1, 2, 3) for node in range(nodes)}
    assert len(names) == 6
    assert name_node(name, 0, 1) == name


def test_a_machine_registers_its_own_shards() -> None:
    sharing = settings(tensor_ranks=2, pipeline_ranks=2, nodes=2)
    assert [group.shards for group in make_register(b"f" * 32, GROUPS, sharing).groups] == [2, 2]


def on_machines(*groups: tuple[GroupFacts, ...]) -> dict[tuple[int, int], Any]:
    """Makes the facts of two ranks of each stage."""
    return {
        (stage, rank): facts(2 * stage + rank, groups=of_stage)
        for stage, of_stage in enumerate(groups)
        for rank in range(2)
    }


def test_machines_have_records_of_their_own_stages() -> None:
    larger = tuple(replace(group, record_bytes=100) for group in GROUPS)
    sharing = settings(tensor_ranks=2, pipeline_ranks=4, nodes=2)
    engine = agree(on_machines(GROUPS, larger, larger, larger), sharing)
    assert [(group.index, group.stage, group.record_bytes) for group in engine.groups] == [
        (0, 0, 64),
        (0, 1, 100),
        (2, 0, 64),
        (2, 1, 100),
    ]
    assert engine.node_bytes == ((64, 100, 64, 100), (100, 100, 100, 100))


def test_a_stage_on_two_machines_has_the_same_records_on_both() -> None:
    ranks = {(0, rank): facts(rank) for rank in range(4)}
    engine = agree(ranks, settings(tensor_ranks=4, nodes=2))
    assert (engine.groups, engine.node_bytes) == (GROUPS, ((64, 64), (64, 64)))


@pytest.mark.parametrize(
    "other",
    [GROUPS[:1], (GROUPS[0], replace(GROUPS[1], index=3)), halved(2, 1)],
    ids=["missing", "index", "replicas"],
)
def test_machines_whose_stages_have_layers_of_other_kinds_are_refused(other: tuple[GroupFacts, ...]) -> None:
    sharing = settings(tensor_ranks=2, pipeline_ranks=2, nodes=2)
    with pytest.raises(IdentityError, match="machines 0 and 1 of this engine are of different KV cache groups"):
        agree(on_machines(GROUPS, other), sharing)
