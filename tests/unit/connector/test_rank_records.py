"""A rank's part of records: the moves that are its own, its shard's place in each slot, and its own digest."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload import native
from kvoffload.cache import SegmentMap
from kvoffload.connector.common.step_plan import BlockMoves, LoadJob, Place, SaveJob, WantedDigests
from kvoffload.connector.identity.agreement import SharingSettings
from kvoffload.connector.rank_records import RankRecords
from kvoffload.connector.saves.rank_part import RankPart
from kvoffload.kvspec import HeadUnits
from kvoffload.native import finish_digests
from tests.kit.connector.facts import group_facts
from tests.kit.connector.workers import Move, SharedCache, identify, make_cache, make_worker, name_of

FINGERPRINT = b"f" * 32
SLOT_BYTES = (152, 256)


def make_records(
    *,
    rank: int = 1,
    replicas: tuple[int, int] = (1, 1),
    stages: tuple[int, int] = (0, 0),
    pipeline_ranks: int = 1,
    units: HeadUnits | None = None,
    own_groups: tuple[int, int] = (1, 2),
) -> RankRecords:
    """Makes the records of a rank of an engine with two shards of each group. The rank's own page map has one group
    before those of the session, which is not stored."""
    groups = [
        replace(group_facts(at), record_bytes=size_bytes, replicas=replicas[at], stage=stages[at])
        for at, size_bytes in enumerate(SLOT_BYTES)
    ]
    sharing = SharingSettings(
        hash_block_size=4,
        hash_algorithm="sha256",
        hash_seed="0",
        tensor_ranks=2 if units is None else units.ranks,
        pipeline_ranks=pipeline_ranks,
        units=units,
    )
    part = RankPart.find(rank, groups, sharing)
    return RankRecords(
        part,
        fingerprint=FINGERPRINT,
        record_bytes=SLOT_BYTES,
        own_groups={at: own for at, own in enumerate(own_groups) if part.is_mine[at]},
    )


def make_records_of_stage(stage: int) -> RankRecords:
    """Makes the records of one of three stages, of which the third has no group."""
    return make_records(rank=2 * stage + 1, stages=(0, 1), pipeline_ranks=3)


def make_memory() -> tuple[SharedCache, SegmentMap]:
    """Slots for two shards."""
    worker = make_worker(ranks=2)
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()
    return worker.shared, worker.shared.client.memory(worker.shared.place.memory_id)


def moves_of(shared: SharedCache) -> BlockMoves:
    return shared.make_moves((Move(1, 1, 0), Move(0, 2, 1), Move(1, 3, 2)))


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shards_record_lies_behind_those_of_the_shards_before_it(shard: int) -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    items = make_records(rank=shard).plan_load(memory, moves)
    assert items.group.tolist() == [2, 1, 2]
    assert items.block.tolist() == [1, 2, 3]
    for at, (group, address) in enumerate(zip(moves.groups.tolist(), moves.addresses.tolist(), strict=True)):
        size_bytes = SLOT_BYTES[group]
        assert items.slot[at] == memory.view(address + shard * size_bytes, size_bytes).ctypes.data
    save = make_records(rank=shard).plan_save(memory, SaveJob(1, Place(1, 1), moves))
    assert save.items.slot.tolist() == items.slot.tolist()
    assert len(save.scratch) == 0


def test_where_a_record_lies_is_a_matter_of_how_many_ranks_hold_the_same() -> None:
    shared, memory = make_memory()
    moves, records = moves_of(shared), make_records(replicas=(2, 1))
    assert [records.begin_of(group) for group in range(2)] == [0, 256]
    assert records.plan_load(memory, moves).slot.tolist() == [
        memory.view(int(moves.addresses[at]) + begin, 152).ctypes.data for at, begin in enumerate((256, 0, 256))
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_writes_its_own_records_and_those_it_compares_to_memory_that_nobody_reads(rank: int) -> None:
    shared, memory = make_memory()
    moves = shared.make_moves(tuple(Move(at % 2, at + 1, at) for at in range(6)))
    job = SaveJob(
        1,
        Place(1, 1),
        moves,
        np.array([0, 0, 1, 1, 1, 1], np.uint8),
        np.array([True, True, True, False, False, True]),
    )
    save = make_records(rank=rank, replicas=(2, 2)).plan_save(memory, job)
    written = ([0, 1], [2, 3, 4, 5])[rank]
    planned = sorted({*written, 0, 1, 2, 5})
    assert save.items.block.tolist() == [at + 1 for at in planned]
    assert save.items.group.tolist() == [1 + at % 2 for at in planned]
    slots = dict(zip(planned, save.items.slot.tolist(), strict=True))
    for at in written:
        assert slots.pop(at) == memory.view(int(moves.addresses[at]), 152).ctypes.data
    begin = save.scratch.ctypes.data
    ends = np.cumsum([SLOT_BYTES[at % 2] for at in slots]).tolist()
    assert [slot - begin for slot in slots.values()] == [0, *ends[:-1]]
    assert len(save.scratch) == ends[-1]


def test_a_slot_that_lies_nowhere_is_named() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    moves.addresses[1] = 1 << 40
    with pytest.raises(ValueError, match=str((1 << 40) + 152)):
        make_records().plan_load(memory, moves)


def test_moves_of_other_stages_are_not_this_ranks() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    items = make_records_of_stage(0).plan_load(memory, moves)
    assert (items.group.tolist(), items.block.tolist()) == ([1], [2])
    assert items.slot.tolist() == [memory.view(int(moves.addresses[1]) + 152, 152).ctypes.data]
    items = make_records_of_stage(1).plan_load(memory, moves)
    assert (items.group.tolist(), items.block.tolist()) == ([2, 2], [1, 3])
    assert len(make_records_of_stage(2).plan_load(memory, moves).block) == 0


def make_load(moves: BlockMoves, data: list[bytes]) -> LoadJob:
    """Makes a load with the digests that these bytes have as records of shard 1; shard 0 has none."""
    digests = [
        int.from_bytes(
            finish_digests(
                native.digest_run(one).to_bytes(16, "little"),
                SLOT_BYTES[group],
                fingerprint=FINGERPRINT,
                block_hashes=name_of(at),
                group=group,
                shard=1,
            ),
            "little",
        )
        for at, (group, one) in enumerate(zip(moves.groups.tolist(), data, strict=True))
    ]
    wanted = WantedDigests(b"".join(map(name_of, range(len(data)))), np.array([[0] * len(data), digests], np.uint64))
    return LoadJob("a", Place(1, 1), moves, wanted)


def totals_of(data: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([[native.digest_run(one) % 2**64, native.digest_run(one) >> 64] for one in data], np.uint64)


def test_a_record_that_is_not_what_was_saved_is_named_by_its_block() -> None:
    shared, _ = make_memory()
    moves = moves_of(shared)
    data = [bytes([at]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    load = make_load(moves, data)
    assert make_records().compare(load, totals_of(data)) == ""
    bad = [data[0], data[1], data[0]]
    assert (
        make_records().compare(load, totals_of(bad))
        == "a record of group 1 differs from the saved bytes (loaded into block 3)"
    )
    assert make_records(rank=0).compare(load, totals_of(bad)) == ""  # its records have no digest
    assert load.wanted is not None
    other = replace(load, wanted=replace(load.wanted, hashes=name_of(1) + name_of(0) + name_of(2)))
    assert "loaded into block 2" in make_records().compare(other, totals_of(data))


def test_a_record_of_another_stage_is_not_compared() -> None:
    shared, _ = make_memory()
    moves = moves_of(shared)
    data = [bytes([at]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    load, records = make_load(moves, data), make_records_of_stage(1)
    assert records.compare(load, totals_of([data[0], data[2]])) == ""
    assert "loaded into block 3" in records.compare(load, totals_of([data[0], data[0]]))
    assert make_records_of_stage(2).compare(load, totals_of([]).reshape(0, 2)) == ""


def test_each_groups_record_is_compared_with_the_digest_of_its_own_shard() -> None:
    """Both ranks hold the first shard of the first group, which has no digest."""
    shared, _ = make_memory()
    moves = moves_of(shared)
    data = [bytes([at]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    load, bad = make_load(moves, data), [data[0], data[0], data[2]]
    assert "loaded into block 2" in make_records().compare(load, totals_of(bad))
    assert make_records(replicas=(2, 1)).compare(load, totals_of(bad)) == ""
    assert load.wanted is not None
    swapped = WantedDigests(load.wanted.hashes, load.wanted.digests[::-1])
    assert "loaded into block 2" in make_records(replicas=(2, 1)).compare(replace(load, wanted=swapped), totals_of(bad))


# ---- several shards a rank ----

ONE_RANK = HeadUnits(heads=2)


def test_a_rank_of_several_shards_has_a_record_of_each_for_every_block() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    records = make_records(rank=0, units=ONE_RANK, own_groups=(2, 7))
    of_shards = [make_records(rank=shard).plan_load(memory, moves).slot.tolist() for shard in range(2)]
    for items in (records.plan_load(memory, moves), records.plan_save(memory, SaveJob(1, Place(1, 1), moves)).items):
        assert items.slot.reshape(-1, 2).T.tolist() == of_shards
        assert items.block.reshape(-1, 2).tolist() == [[1, 1], [2, 2], [3, 3]]
        assert items.group.reshape(-1, 2).tolist() == [[7, 8], [2, 3], [7, 8]]


def test_a_rank_lies_behind_the_shards_of_the_ranks_before_it() -> None:
    records = make_records(units=HeadUnits(heads=4, ranks=2))
    assert [records.begin_of(group) for group in range(2)] == [2 * size_bytes for size_bytes in SLOT_BYTES]


def test_all_shards_of_what_a_rank_only_compares_have_memory_of_their_own() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    writers, compared = np.array([0, 0, 1], np.uint8), np.array([True, True, False])
    part = make_records(rank=0, units=ONE_RANK).part
    other = replace(part, rank=1, turns=np.ones(2, np.int64))
    records = RankRecords(other, fingerprint=FINGERPRINT, record_bytes=SLOT_BYTES, own_groups={0: 2, 1: 7})
    items, scratch = records.plan_save(memory, SaveJob(1, Place(1, 1), moves, writers, compared))
    begin, written = scratch.ctypes.data, memory.view(int(moves.addresses[2]), 512).ctypes.data
    assert items.slot.tolist() == [*(begin + at for at in (0, 256, 512, 664)), written, written + 256]
    assert len(scratch) == 512 + 304


def test_digests_of_several_shards_are_compared_each_by_itself() -> None:
    shared, _ = make_memory()
    moves = moves_of(shared)
    data = [bytes([at]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    other = [bytes([at + 9]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    both = np.stack([totals_of(other), totals_of(data)], axis=1).reshape(-1, 2)
    records = make_records(rank=0, units=ONE_RANK)
    load = make_load(moves, data)
    assert records.compare(load, both) == ""  # the first shard has no digest
    both[5] = both[0]
    assert "loaded into block 3" in records.compare(load, both)
