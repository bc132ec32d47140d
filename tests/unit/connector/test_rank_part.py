"""What a rank writes: one of the ranks that hold a shard, by the hash of the block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kit.connector.facts import GROUPS

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.connector.rank_part import RankPart
from kvoffload.connector.step_plan import BlockMoves, Place, SaveJob


def parts(*replicas: int, ranks: int) -> list[RankPart]:
    groups = [replace(group, replicas=count) for group, count in zip(GROUPS, replicas, strict=True)]
    return [RankPart.find(rank, groups) for rank in range(ranks)]


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
