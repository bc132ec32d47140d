"""Ranks that agree are one engine; the others do not start."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from tests.kit.connector.facts import GROUPS, facts

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.engine.pipeline import combine_weights, name_pipeline
from kvoffload.connector.identity.agreement import SharingTerms, add_report, agree, make_register, name_node
from kvoffload.connector.step_plan import Place, WeightDigests
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.kvspec import AllocationReport, CompletenessReport, HeadUnits
from kvoffload.protocol import Reuse
from kvoffload.protocol.limits import MAX_REPORT


def terms(**changes: Any) -> SharingTerms:
    given = {"hash_block_size": 4, "hash_algorithm": "sha256", "hash_seed": "7", "tensor_ranks": 1}
    return SharingTerms(**{**given, **changes})


# ---- ranks ----


@pytest.mark.parametrize(
    ("tensor", "pipeline", "replicas", "shards", "writers"),
    [
        (1, 1, 1, [0], [0]),
        (2, 1, 1, [0, 1], [0, 1]),
        (4, 1, 2, [0, 0, 1, 1], [0, 2]),
        (4, 1, 4, [0, 0, 0, 0], [0]),
        (2, 2, 2, [0, 0, 0, 0], [0, 2]),
        (2, 2, 1, [0, 1, 0, 1], [0, 1, 2, 3]),
    ],
)
def test_each_shard_has_one_writer(
    tensor: int, pipeline: int, replicas: int, shards: list[int], writers: list[int]
) -> None:
    sharing = terms(tensor_ranks=tensor, pipeline_ranks=pipeline, replicas=replicas)
    assert [list(sharing.shards_held_by(rank)) for rank in range(sharing.ranks)] == [[shard] for shard in shards]
    assert [rank for rank in range(sharing.ranks) if sharing.is_writer(rank)] == writers
    assert sharing.shards == len(set(shards)) == len(writers) // pipeline
    parts = {sharing.part_of(rank) for rank in range(sharing.ranks)}
    assert parts == set(range(len(writers))) == {sharing.part_of(rank) for rank in writers}


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
    sharing = terms(tensor_ranks=tensor, replicas=units.replicas, units=units)
    assert [list(sharing.shards_held_by(rank)) for rank in range(tensor)] == shards
    written = [shard for rank in range(tensor) if sharing.is_writer(rank) for shard in sharing.shards_held_by(rank)]
    assert written == list(range(heads))
    register = make_register(b"f" * 32, GROUPS, sharing)
    assert (sharing.shards, register.ranks, {group.shards for group in register.groups}) == (heads, tensor, {heads})


# ---- agreement ----


def test_one_rank_is_an_engine() -> None:
    engine = agree({(0, 0): facts()}, terms())
    assert (engine.fingerprint, engine.groups, engine.num_blocks, engine.cache_bytes) == (b"f" * 32, GROUPS, 8, 1000)


def test_a_missing_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="1 of 2 ranks"):
        agree({(0, 0): facts()}, terms(tensor_ranks=2))


def test_ranks_of_different_identity_are_refused_by_the_field_they_differ_in() -> None:
    other = facts(1, fingerprint=b"g" * 32, description={"model": "acme/other"})
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\).*model: 'acme/tiny' here, 'acme/other' there"):
        agree({(0, 0): facts(), (0, 1): other}, terms(tensor_ranks=2))


@pytest.mark.parametrize("groups", [tuple(reversed(GROUPS)), GROUPS[:1], (GROUPS[0], replace(GROUPS[1], index=3))])
def test_ranks_with_different_groups_are_refused(groups: Any) -> None:
    with pytest.raises(IdentityError, match="different KV cache groups"):
        agree({(0, 0): facts(), (0, 1): facts(1, groups=groups)}, terms(tensor_ranks=2))


def test_ranks_of_a_pipeline_differ_and_the_ranks_of_a_stage_do_not() -> None:
    """Each has layers of its own; all that they hold together has one name, whatever order they came in."""
    sharing = terms(tensor_ranks=2, pipeline_ranks=2)
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


def test_ranks_of_a_stage_with_records_of_other_sizes_are_refused() -> None:
    other = facts(1, groups=(GROUPS[0], replace(GROUPS[1], record_bytes=65)))
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\) have different KV cache groups"):
        agree({(0, 0): facts(), (0, 1): other}, terms(tensor_ranks=2))


def test_another_division_of_the_same_layers_is_another_engine() -> None:
    sharing = terms(pipeline_ranks=2)
    one, other = ((b"f", b"g"), (b"g", b"f"))
    engines = [
        agree({(stage, 0): facts(stage, fingerprint=name * 32) for stage, name in enumerate(names)}, sharing)
        for names in (one, other)
    ]
    assert engines[0].fingerprint != engines[1].fingerprint


def test_ranks_that_know_their_weights_are_an_engine_of_these_weights() -> None:
    sharing = terms(tensor_ranks=2)
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
    register = make_register(b"f" * 32, GROUPS, terms(tensor_ranks=4, replicas=2), rank=3, tenant="acme")
    assert register.fingerprint == b"f" * 32
    assert (register.rank, register.ranks, register.tenant) == (3, 4, "acme")
    assert (register.hash_block_size, register.hash_algorithm) == (4, "sha256")
    assert register.hash_seed == sha256(b"7").digest()
    assert [(group.record_bytes, group.block_size, group.window, group.shards) for group in register.groups] == [
        (64, 4, 0, 2),
        (64, 8, 6, 2),
    ]
    assert [group.reuse for group in register.groups] == [Reuse.PREFIX, Reuse.WINDOW]


def test_of_a_pipeline_the_first_stage_and_the_number_of_stages_are_described() -> None:
    sharing = terms(pipeline_ranks=2)
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
    """What else differed would be refused."""
    sharing = terms(tensor_ranks=2)
    engine = agree({(0, rank): facts(rank) for rank in range(2)}, sharing)
    of_scheduler = make_register(engine.fingerprint, engine.groups, sharing)
    for rank in range(2):
        of_worker = make_register(b"f" * 32, GROUPS, sharing, rank=rank)
        assert replace(of_worker, rank=0) == of_scheduler


def test_a_report_goes_with_it_as_far_as_it_fits() -> None:
    register = make_register(b"f" * 32, GROUPS, terms(tensor_ranks=2))
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
    sharing = terms(tensor_ranks=4, nodes=2)
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
    sharing = terms(tensor_ranks=2, pipeline_ranks=2, nodes=2)
    assert [group.shards for group in make_register(b"f" * 32, GROUPS, sharing).groups] == [2, 2]
    assert [sharing.list_shards(node) for node in range(2)] == [slice(0, 2), slice(2, 4)]
    assert [sharing.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
