"""Ranks' reports of a save are put together by shard, and ranks that should hold the same bytes are compared, within
their stage and on their machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from tests.kit.connector.facts import GROUPS

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import numpy.typing as npt

from kvoffload.connector.common.step_plan import BlockMoves, GroupFacts, Place, SaveJob
from kvoffload.connector.identity.agreement import SharingSettings
from kvoffload.connector.saves.rank_digests import COMPARED_AT_ONCE, COMPARED_RECORDS, RankDigests
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.kvspec import HeadUnits


def groups_of(*replicas: int, stages: tuple[int, int] = (0, 0)) -> list[GroupFacts]:
    return [
        replace(group, replicas=count, stage=stage)
        for group, count, stage in zip(GROUPS, replicas, stages, strict=True)
    ]


def sharing_of(ranks: int, **settings: Any) -> SharingSettings:
    """`ranks`: of each stage."""
    return SharingSettings(hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=ranks, **settings)


def name_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def make_job(digests: RankDigests, groups: list[int]) -> SaveJob:
    numbers, blocks = np.array(groups, np.int64), np.arange(1, len(groups) + 1)
    writers, compared = digests.choose_writers(numbers, [name_of(at) for at in range(len(groups))])
    return SaveJob(1, Place(1, 1), BlockMoves(numbers, blocks, blocks.astype(np.uint64)), writers, compared)


def report(
    job: SaveJob, groups: list[GroupFacts], sharing: SharingSettings, sums: npt.NDArray[np.uint64]
) -> dict[int, bytes]:
    """Makes the reports of ranks that hold the bytes of these sums, by shard of all servers."""
    reported = {}
    for rank in range(sharing.ranks):
        part = RankPart.find(rank, groups, sharing)
        at = np.flatnonzero(part.find_digested(job))
        rows = part.rows[job.moves.groups[at]][:, None] + np.arange(part.run)
        reported[rank] = sums[rows, at[:, None]].tobytes()
    return reported


def change_last(reported: dict[int, bytes], rank: int) -> dict[int, bytes]:
    """This rank holds other bytes of the last record that it reports."""
    rows = np.frombuffer(reported[rank], np.uint64).copy()
    rows[-1] ^= np.uint64(1)
    return {**reported, rank: rows.tobytes()}


def draw_sums(shards: int, moves: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(1).integers(1, 1 << 63, (shards, moves, 2)).astype(np.uint64)


@pytest.mark.parametrize(("replicas", "ranks"), [((1, 1), 1), ((1, 1), 4), ((2, 1), 2), ((4, 2), 4), ((2, 4), 8)])
def test_digests_are_put_together_by_shard(replicas: tuple[int, int], ranks: int) -> None:
    groups, sharing = groups_of(*replicas), sharing_of(ranks)
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0] * 20 + [1] * 20)
    sums = draw_sums(ranks // min(replicas), 40)
    found = digests.gather(job, report(job, groups, sharing, sums))
    assert found is not None
    for group, count in enumerate(replicas):
        rows = job.moves.groups == group
        assert (found[: ranks // count, rows] == sums[: ranks // count, rows]).all()
    assert digests.unequal == {}


@pytest.mark.parametrize(("replicas", "rows"), [((1, 1), 2), ((2, 1), 2), ((2, 2), 1)])
def test_each_stage_tells_of_its_own_group_alone(replicas: tuple[int, int], rows: int) -> None:
    groups, sharing = groups_of(*replicas, stages=(0, 1)), sharing_of(2, pipeline_ranks=2)
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0] * 20 + [1] * 20)
    sums = draw_sums(rows, 40)
    reported = report(job, groups, sharing, sums)
    found = digests.gather(job, reported)
    assert found is not None
    assert found.shape == (rows, 40, 2)
    for group, count in enumerate(replicas):
        at = job.moves.groups == group
        assert (found[: 2 // count, at] == sums[: 2 // count, at]).all()
        assert not found[2 // count :, at].any()
    assert digests.unequal == {}
    assert digests.gather(job, {rank: reported[rank] for rank in range(3)}) is None, "the second stage's last rank"


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_machine_has_a_writer_of_every_record(replicas: int) -> None:
    """With 4 replicas on two machines, each keeps what its two ranks hold."""
    groups, sharing = groups_of(replicas, 1), sharing_of(4, nodes=2)
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0] * 20 + [1] * 20)
    sums = draw_sums(4, 40)
    found = digests.gather(job, report(job, groups, sharing, sums))
    assert found is not None
    assert (found[:, 20:] == sums[:, 20:]).all(), "of the group whose ranks all hold their own"
    kept = [0, 1, 2, 3] if replicas == 1 else [0, 2]
    assert (found[kept, :20] == sums[kept, :20]).all()


@pytest.mark.parametrize(("heads", "ranks", "nodes"), [(4, 1, 1), (4, 2, 1), (4, 2, 2), (2, 4, 1)])
def test_a_rank_reports_each_of_its_units(heads: int, ranks: int, nodes: int) -> None:
    groups = groups_of(*[max(ranks // heads, 1)] * 2)
    sharing = sharing_of(ranks, nodes=nodes, units=HeadUnits(heads=heads, ranks=ranks))
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0] * 20 + [1] * 20)
    sums = draw_sums(heads, 40)
    reported = report(job, groups, sharing, sums)
    found = digests.gather(job, reported)
    assert found is not None
    assert (found == sums).all()
    assert digests.gather(job, {**reported, 0: reported[0][:-16]}) is None, "a unit that nobody told of"


@pytest.mark.parametrize("lost", [b"", b"0" * 16])
def test_what_a_rank_did_not_report_is_missed(lost: bytes) -> None:
    groups, sharing = groups_of(2, 1), sharing_of(2)
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0, 0, 1])
    reported = report(job, groups, sharing, draw_sums(2, 3))
    assert digests.gather(job, reported) is not None
    assert digests.gather(job, {**reported, 1: lost}) is None
    assert digests.gather(job, {0: reported[0]}) is None


def test_all_ranks_that_hold_a_shard_write_about_as_much() -> None:
    job = make_job(RankDigests(groups_of(4, 1), sharing_of(8)), [0] * 4000 + [1] * 100)
    assert job.writers is not None
    share = Counter(job.writers[:4000].tolist())
    assert sorted(share) == [0, 1, 2, 3]
    assert all(900 < count < 1100 for count in share.values())
    assert not job.writers[4000:].any()


def test_the_writer_of_a_block_is_the_same_in_every_job() -> None:
    digests = RankDigests(groups_of(4, 1), sharing_of(4))
    first, second = make_job(digests, [0] * 50), make_job(digests, [0] * 100)
    assert first.writers is not None
    assert second.writers is not None
    assert (first.writers == second.writers[:50]).all()


def test_where_no_ranks_hold_the_same_nothing_is_chosen_and_nothing_compared() -> None:
    job = make_job(RankDigests(groups_of(1, 1), sharing_of(4)), [0, 1])
    assert (job.writers, job.compared) == (None, None)


def test_the_first_records_of_a_group_are_compared_some_in_each_save() -> None:
    groups, sharing = groups_of(2, 1), sharing_of(2)
    digests = RankDigests(groups, sharing)
    compared = 0
    while (job := make_job(digests, [1, 0] * 20)).compared is not None:
        assert not job.compared[job.moves.groups == 1].any()
        assert 0 < job.compared.sum() <= COMPARED_AT_ONCE
        compared += int(job.compared.sum())
        reported = report(job, groups, sharing, draw_sums(2, 40))
        assert digests.gather(job, reported) is not None
    assert compared == COMPARED_RECORDS
    digests.compare_again()
    assert make_job(digests, [0]).compared is not None


def test_ranks_that_hold_other_bytes_are_named_and_nothing_is_put_together_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups, sharing = groups_of(2, 2), sharing_of(4)
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0, 1, 1])
    good = report(job, groups, sharing, draw_sums(2, 3))
    assert job.writers is not None
    # Of the ranks 2 and 3, who hold the second shard, the one that does not write the last block.
    assert digests.gather(job, change_last(good, 2 + 1 - int(job.writers[2]))) is None
    assert digests.unequal == {1: [2, 3]}
    assert "group 2: ranks 2, 3 should hold the same bytes of its blocks and do not" in caplog.text
    assert digests.gather(job, good) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("groups", "sharing", "what_then"),
    [
        (groups_of(2, 2, stages=(0, 1)), sharing_of(2, pipeline_ranks=2), "every rank's own are stored"),
        (groups_of(2, 2), sharing_of(4, nodes=2), "nothing is saved or restored any more"),
        (groups_of(2, 2), sharing_of(4, units=HeadUnits(heads=2, ranks=4)), "nothing is saved or restored any more"),
    ],
    ids=["stages", "machines", "units"],
)
def test_a_rank_is_compared_with_those_that_hold_the_same_beside_it(
    groups: list[GroupFacts], sharing: SharingSettings, what_then: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks 0 and 1, of another stage, machine or unit, have nothing to do with it."""
    digests = RankDigests(groups, sharing)
    job = make_job(digests, [0, 1, 1])
    good = report(job, groups, sharing, draw_sums(2, 3))
    assert job.writers is not None
    assert digests.gather(job, change_last(good, 2 + 1 - int(job.writers[2]))) is None
    assert digests.unequal == {1: [2, 3]}
    assert what_then in caplog.text
