"""A rank's part of records: its shard's place in each slot, zeros behind a short record, and its own digest."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload import native
from kvoffload.cache import SegmentMap
from kvoffload.connector.rank_records import RankRecords
from kvoffload.connector.step_plan import BlockMoves, LoadJob, Place, WantedDigests
from kvoffload.native import finish_digests
from tests.kit.connector.workers import Move, SharedCache, identify, make_cache, make_worker, name_of

FINGERPRINT = b"f" * 32
SLOT_BYTES = (152, 256)


def make_records(
    *, shard: int = 1, shards: range | None = None, record_bytes: tuple[int, int] = SLOT_BYTES
) -> RankRecords:
    return RankRecords(
        shards=shards or range(shard, shard + 1),
        fingerprint=FINGERPRINT,
        record_bytes=record_bytes,
        slot_bytes=SLOT_BYTES,
        page_groups=(2, 7),
    )


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
    found = make_records(shard=shard).find_slots(memory, moves)
    for at, (group, address) in enumerate(zip(moves.groups.tolist(), moves.addresses.tolist(), strict=True)):
        size_bytes = SLOT_BYTES[group]
        assert found[at].tolist() == [memory.view(address + shard * size_bytes, size_bytes).ctypes.data]


def test_a_slot_that_lies_nowhere_is_named() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    moves.addresses[1] = 1 << 40
    with pytest.raises(ValueError, match=str((1 << 40) + 152)):
        make_records().find_slots(memory, moves)


def test_what_a_short_record_leaves_is_zeros_and_nothing_else_is_touched() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    slots = [
        memory.view(address, 2 * SLOT_BYTES[group])
        for group, address in zip(moves.groups.tolist(), moves.addresses.tolist(), strict=True)
    ]
    for slot in slots:
        slot[:] = 7
    make_records(record_bytes=(152, 200)).clear_tails(memory, moves)
    assert [np.flatnonzero(slot == 0).tolist() for slot in slots] == [
        list(range(256 + 200, 512)),
        [],
        list(range(256 + 200, 512)),
    ]


def make_load(moves: BlockMoves, data: list[bytes]) -> LoadJob:
    """With the digests that these bytes have as records of shard 1; shard 0 has none."""
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
        == "a record of group 1 is not what was saved (loaded into block 3)"
    )
    assert make_records(shard=0).compare(load, totals_of(bad)) == ""  # nobody has made a digest of its records
    assert load.wanted is not None
    other = replace(load, wanted=replace(load.wanted, hashes=name_of(1) + name_of(0) + name_of(2)))
    assert "loaded into block 2" in make_records().compare(other, totals_of(data))


def test_a_rank_of_several_shards_has_a_record_of_each_for_every_block() -> None:
    shared, memory = make_memory()
    moves = moves_of(shared)
    items = make_records(shards=range(2)).find_items(memory, moves)
    first = [make_records(shard=shard).find_slots(memory, moves)[:, 0].tolist() for shard in range(2)]
    assert items.slot.reshape(-1, 2).T.tolist() == first
    assert items.block.reshape(-1, 2).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert items.group.reshape(-1, 2).tolist() == [[7, 8], [2, 3], [7, 8]]


def test_digests_of_several_shards_are_told_and_compared_each_by_itself() -> None:
    shared, _ = make_memory()
    moves = moves_of(shared)
    data = [bytes([at]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    other = [bytes([at + 9]) * SLOT_BYTES[group] for at, group in enumerate(moves.groups.tolist())]
    both = np.stack([totals_of(other), totals_of(data)], axis=1).reshape(-1, 2)
    records = make_records(shards=range(2))
    assert records.split_digests(both) == {0: totals_of(other).tobytes(), 1: totals_of(data).tobytes()}
    load = make_load(moves, data)
    assert records.compare(load, both) == ""  # nobody has made a digest of the first shard's
    both[5] = both[0]
    assert "loaded into block 3" in records.compare(load, both)
