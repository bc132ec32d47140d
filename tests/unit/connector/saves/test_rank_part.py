"""The part of a block that a rank has, and the part that it writes: the block's hash chooses one of the ranks that hold
a shard."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from tests.kit.connector.facts import GROUPS

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.connector.common.step_plan import BlockMoves, Place, SaveJob
from kvoffload.connector.identity.agreement import SharingSettings
from kvoffload.connector.saves.rank_digests import RankDigests
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.kvspec import HeadUnits


def parts(*replicas: int, ranks: int, stages: tuple[int, int] = (0, 0), **settings: Any) -> list[RankPart]:
    """Makes the parts of all ranks of the engine, of which `ranks` are of each stage."""
    groups = [
        replace(group, replicas=count, stage=stage)
        for group, count, stage in zip(GROUPS, replicas, stages, strict=True)
    ]
    sharing = SharingSettings(hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=ranks, **settings)
    return [RankPart.find(rank, groups, sharing) for rank in range(sharing.ranks)]


def make_job(groups: list[int], *, writers: list[int] | None = None, compared: list[bool] | None = None) -> SaveJob:
    blocks: Any = np.arange(1, len(groups) + 1)
    moves = BlockMoves(np.array(groups, np.int64), blocks, blocks.astype(np.uint64))
    return SaveJob(
        1,
        Place(1, 1),
        moves,
        None if writers is None else np.array(writers, np.uint8),
        None if compared is None else np.array(compared, np.bool_),
    )


@pytest.mark.parametrize(
    ("replicas", "shards"),
    [((1, 1), [(0, 0), (1, 1), (2, 2), (3, 3)]), ((4, 1), [(0, 0), (0, 1), (0, 2), (0, 3)]),
     ((2, 4), [(0, 0), (0, 0), (1, 0), (1, 0)])],
)  # fmt: skip
def test_the_shard_of_a_rank_is_a_matter_of_the_group(replicas: tuple[int, int], shards: list[tuple[int, int]]) -> None:
    assert [tuple(part.shards.tolist()) for part in parts(*replicas, ranks=4)] == shards


def test_where_no_ranks_hold_the_same_every_rank_writes_everything() -> None:
    for part in parts(1, 1, ranks=2):
        assert part.find_written(make_job([0, 1])).tolist() == [True, True]


def test_each_record_has_one_writer_in_each_shard() -> None:
    job = make_job([0, 0, 0, 1, 1], writers=[0, 1, 1, 0, 0])
    written = np.array([part.find_written(job) for part in parts(2, 1, ranks=4)])
    assert written.astype(int).tolist() == [
        [1, 0, 0, 1, 1],
        [0, 1, 1, 1, 1],
        [1, 0, 0, 1, 1],
        [0, 1, 1, 1, 1],
    ]


def test_what_is_compared_has_digests_of_all_its_ranks() -> None:
    job = make_job([0, 0, 1], writers=[0, 1, 0], compared=[True, False, False])
    digested = [part.find_digested(job).tolist() for part in parts(2, 1, ranks=2)]
    assert digested == [[True, False, True], [True, True, True]]


def test_a_rank_has_the_groups_of_its_own_stage() -> None:
    job = make_job([0, 1, 1], compared=[True, True, False])
    of_ranks = parts(1, 1, ranks=2, stages=(0, 1), pipeline_ranks=2)
    for first, second in (of_ranks[:2], of_ranks[2:]):
        assert (first.shards.tolist(), second.shards.tolist()) == ([0, 0], [1, 1])
    for rank, mine in enumerate([[True, False, False]] * 2 + [[False, True, True]] * 2):
        part = of_ranks[rank]
        assert part.rank == rank
        assert part.is_mine.tolist() == mine[:2]
        assert part.find_loaded(job.moves).tolist() == mine
        assert part.find_written(job).tolist() == mine
        assert part.find_digested(job).tolist() == mine


def test_of_ranks_of_a_stage_that_hold_the_same_one_writes_what_their_stage_has() -> None:
    job = make_job([0, 0, 1, 1], writers=[0, 1, 0, 1], compared=[True, False, True, False])
    of_ranks = parts(2, 2, ranks=2, stages=(0, 1), pipeline_ranks=2)
    assert np.array([part.find_written(job) for part in of_ranks]).astype(int).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert np.array([part.find_digested(job) for part in of_ranks]).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("replicas", "shards", "rows", "turns"),
    [
        ((1, 1), [0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]),
        # The other group has two shards on each machine.
        ((2, 1), [0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 0, 1]),
        ((2, 2), [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]),
        ((4, 4), [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]),
    ],
)
def test_each_machine_counts_its_shards_and_writers_from_0(
    replicas: tuple[int, int], shards: list[int], rows: list[int], turns: list[int]
) -> None:
    of_ranks = parts(*replicas, ranks=4, nodes=2)
    assert [int(part.shards[0]) for part in of_ranks] == shards
    assert [int(part.rows[0]) for part in of_ranks] == rows
    assert [int(part.turns[0]) for part in of_ranks] == turns


@pytest.mark.parametrize("replicas", [2, 4])
def test_every_record_has_a_writer_on_each_machine(replicas: int) -> None:
    groups = [replace(group, replicas=replicas) for group in GROUPS]
    sharing = SharingSettings(hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=4, nodes=2)
    names = [sha256(str(at).encode()).digest() for at in range(40)]
    writers, _ = RankDigests(groups, sharing).choose_writers(np.zeros(40, np.int64), names)
    assert writers is not None
    job = make_job([0] * 40, writers=writers.tolist())
    written = np.array([part.find_written(job) for part in parts(replicas, replicas, ranks=4, nodes=2)])
    assert (written[:2].sum(axis=0) == 1).all()
    assert (written[2:].sum(axis=0) == 1).all()


def test_machines_with_a_stage_each_have_all_groups() -> None:
    of_ranks = parts(1, 1, ranks=2, pipeline_ranks=2, nodes=2)
    assert [part.is_mine.tolist() for part in of_ranks] == [[True, True]] * 4
    assert [part.rows.tolist() for part in of_ranks] == [[0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    ("heads", "ranks", "nodes", "run", "shards", "rows"),
    [
        (4, 1, 1, 4, [0], [0]),
        (4, 2, 1, 2, [0, 2], [0, 2]),
        (4, 4, 1, 1, [0, 1, 2, 3], [0, 1, 2, 3]),
        (2, 4, 1, 1, [0, 0, 1, 1], [0, 0, 1, 1]),
        (4, 2, 2, 2, [0, 0], [0, 2]),
        (2, 4, 2, 1, [0, 0, 0, 0], [0, 0, 1, 1]),
    ],
)
def test_a_rank_has_its_units_in_a_row(
    heads: int, ranks: int, nodes: int, run: int, shards: list[int], rows: list[int]
) -> None:
    units = HeadUnits(heads=heads, ranks=ranks)
    of_ranks = parts(units.replicas, units.replicas, ranks=ranks, nodes=nodes, units=units)
    assert {part.run for part in of_ranks} == {run}
    assert [int(part.shards[1]) for part in of_ranks] == shards
    assert [int(part.rows[1]) for part in of_ranks] == rows


def test_what_a_rank_reports_is_read_by_record_and_shard() -> None:
    (part,) = parts(1, 1, ranks=1, units=HeadUnits(heads=2))
    words = np.arange(12, dtype=np.uint64)
    read = part.read_digests(words.tobytes(), 3)
    assert read is not None
    assert read.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert part.read_digests(b"", 0) is not None
    for reported in (b"", words[:11].tobytes(), words[:6].tobytes(), words.tobytes() + b"x"):
        assert part.read_digests(reported, 3) is None
