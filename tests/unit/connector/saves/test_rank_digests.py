"""What ranks report of a save is put together by shard, and ranks that should hold the same bytes are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest

from tests.kit.connector.facts import GROUPS

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import numpy.typing as npt

from kvoffload.connector.rank_part import RankPart
from kvoffload.connector.saves.rank_digests import COMPARED_AT_ONCE, COMPARED_RECORDS, RankDigests
from kvoffload.connector.step_plan import BlockMoves, GroupFacts, Place, SaveJob


def groups_of(*replicas: int) -> list[GroupFacts]:
    return [replace(group, replicas=count) for group, count in zip(GROUPS, replicas, strict=True)]


def name_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def make_job(digests: RankDigests, groups: list[int]) -> SaveJob:
    numbers, blocks = np.array(groups, np.int64), np.arange(1, len(groups) + 1)
    writers, compared = digests.choose_writers(numbers, [name_of(at) for at in range(len(groups))])
    return SaveJob(1, Place(1, 1), BlockMoves(numbers, blocks, blocks.astype(np.uint64)), writers, compared)


def report(job: SaveJob, groups: list[GroupFacts], ranks: int, sums: npt.NDArray[np.uint64]) -> dict[int, bytes]:
    """What ranks say that hold what these sums are of, by shard."""
    reported = {}
    for rank in range(ranks):
        part = RankPart.find(rank, groups)
        at = np.flatnonzero(part.find_digested(job))
        reported[rank] = sums[part.shards[job.moves.groups[at]], at].tobytes()
    return reported


def draw_sums(shards: int, moves: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(1).integers(1, 1 << 63, (shards, moves, 2)).astype(np.uint64)


@pytest.mark.parametrize(("replicas", "ranks"), [((1, 1), 1), ((1, 1), 4), ((2, 1), 2), ((4, 2), 4), ((2, 4), 8)])
def test_digests_are_put_together_by_shard(replicas: tuple[int, int], ranks: int) -> None:
    groups = groups_of(*replicas)
    digests = RankDigests(groups, ranks=ranks)
    job = make_job(digests, [0] * 20 + [1] * 20)
    sums = draw_sums(ranks // min(replicas), 40)
    reported = report(job, groups, ranks, sums)
    found = digests.gather(job, reported)
    assert found is not None
    for group, count in enumerate(replicas):
        rows = job.moves.groups == group
        assert (found[: ranks // count, rows] == sums[: ranks // count, rows]).all()
    assert digests.unequal == {}


@pytest.mark.parametrize("lost", [b"", b"0" * 16])
def test_what_a_rank_did_not_report_is_missed(lost: bytes) -> None:
    groups = groups_of(2, 1)
    digests = RankDigests(groups, ranks=2)
    job = make_job(digests, [0, 0, 1])
    reported = report(job, groups, 2, draw_sums(2, 3))
    assert digests.gather(job, reported) is not None
    assert digests.gather(job, {**reported, 1: lost}) is None
    assert digests.gather(job, {0: reported[0]}) is None


def test_all_ranks_that_hold_a_shard_write_about_as_much() -> None:
    job = make_job(RankDigests(groups_of(4, 1), ranks=8), [0] * 4000 + [1] * 100)
    assert job.writers is not None
    share = Counter(job.writers[:4000].tolist())
    assert sorted(share) == [0, 1, 2, 3]
    assert all(900 < count < 1100 for count in share.values())
    assert not job.writers[4000:].any()


def test_the_writer_of_a_block_is_the_same_in_every_job() -> None:
    digests = RankDigests(groups_of(4, 1), ranks=4)
    first, second = make_job(digests, [0] * 50), make_job(digests, [0] * 100)
    assert first.writers is not None
    assert second.writers is not None
    assert (first.writers == second.writers[:50]).all()


def test_where_no_ranks_hold_the_same_nothing_is_chosen_and_nothing_compared() -> None:
    job = make_job(RankDigests(groups_of(1, 1), ranks=4), [0, 1])
    assert (job.writers, job.compared) == (None, None)


def test_the_first_records_of_a_group_are_compared_some_in_each_save() -> None:
    groups = groups_of(2, 1)
    digests = RankDigests(groups, ranks=2)
    compared = 0
    while (job := make_job(digests, [1, 0] * 20)).compared is not None:
        assert not job.compared[job.moves.groups == 1].any()
        assert 0 < job.compared.sum() <= COMPARED_AT_ONCE
        compared += int(job.compared.sum())
        reported = report(job, groups, 2, draw_sums(2, 40))
        assert digests.gather(job, reported) is not None
    assert compared == COMPARED_RECORDS
    digests.compare_again()
    assert make_job(digests, [0]).compared is not None


def test_ranks_that_hold_other_bytes_are_named_and_nothing_is_put_together_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = groups_of(2, 2)
    digests = RankDigests(groups, ranks=4)
    job = make_job(digests, [0, 1, 1])
    good = report(job, groups, 4, draw_sums(2, 3))
    reported = dict(good)
    assert job.writers is not None
    # Of the ranks 2 and 3, who hold the second shard, the one that does not write the last block.
    other = 2 + 1 - int(job.writers[2])
    rows = np.frombuffer(reported[other], np.uint64).reshape(-1, 2).copy()
    rows[-1, 1] ^= np.uint64(1)
    reported[other] = rows.tobytes()
    assert digests.gather(job, reported) is None
    assert digests.unequal == {1: [2, 3]}
    assert "group 2: ranks 2, 3 should hold the same bytes of its blocks and do not" in caplog.text
    assert digests.gather(job, good) is None
    assert len(caplog.records) == 1
