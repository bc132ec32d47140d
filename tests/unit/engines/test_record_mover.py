"""Saved records are published or their slots given back, and loaded ones that are wrong are forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvoffload import native
from kvoffload.cache import Ask, ReservedSlots
from kvoffload.engines.record_mover import Move, RecordDigests, RecordMover, Records
from kvoffload.kvspec import Registration
from kvoffload.sglang.pools import describe_pool
from kvoffload.transfer import CopyDirection, open_engine
from tests.kit.cache.cache_model import make_chain
from tests.kit.sglang.linked import FINGERPRINT, SessionCache
from tests.kit.sglang.pools import PAGE, SWAKVPool, copy_rows, fill, rows_of
from tests.kit.transfer.stand_ins import FailingEngine, HeldEngine

NAMES = make_chain(1, 2)
ALL, NONE = [[True] * 2] * 2, [[False] * 2] * 2


class Moving:
    """A mover between two pools and a cache of this process. Tests decide when copies begin."""

    def __init__(self) -> None:
        pool = SWAKVPool()
        self.pools = (pool.full_kv_pool, pool.swa_kv_pool)
        for seed, one in enumerate(self.pools):
            fill(one, seed)
        pages, registration = describe_pool(pool, page_size=PAGE, window=2 * PAGE), Registration()
        registration.register(pages.geometry, pages.tensors)
        self.digests = RecordDigests(FINGERPRINT, [group.record_bytes for group in pages.geometry.groups])
        self.cache = SessionCache(pages.geometry.groups)
        self.engine = HeldEngine(open_engine(registration.page_map, registration.memory))
        self.mover: RecordMover[str] = RecordMover(self.cache, self.engine, self.digests)  # type: ignore[arg-type]

    def reserve(self) -> tuple[list[Records], list[ReservedSlots]]:
        """Returns parts of both groups, pages 1 and 2 of each, and their slots."""
        slots = [self.cache.take(group, 2) for group in range(2)]
        return [Records(NAMES, np.array([1, 2]), at.group, at.memory_id, at.addresses) for at in slots], slots

    def lease(self, *, is_compared: bool) -> list[Records]:
        """Returns parts that load the saved records to pages 3 and 4."""
        found = self.cache.session.acquire(Ask(NAMES, alignment=PAGE, shards=(0,)))
        assert found.lease is not None
        place = found.lease.memory_id
        return [
            Records(NAMES, np.array([3, 4]), at, place, one.addresses, one.digests[0] if is_compared else None)
            for at, one in enumerate(found.groups)
        ]

    def end(self) -> Move[str]:
        assert self.engine.fence(60.0)
        (move,) = self.mover.poll()
        return move

    def find_kept(self) -> list[list[bool]]:
        return [self.cache.lookup(group, NAMES).tolist() for group in range(2)]


@pytest.fixture
def moving() -> Iterator[Moving]:
    moving = Moving()
    yield moving
    moving.engine.close()
    moving.cache.close()


@pytest.mark.parametrize("is_compared", [False, True])
def test_saved_records_come_back_to_other_blocks(moving: Moving, is_compared: bool) -> None:
    moving.mover.begin("save", *moving.reserve())
    assert moving.end().is_published
    moving.mover.begin("load", moving.lease(is_compared=is_compared))
    move = moving.end()
    assert (move.job, move.fault, sum(map(len, move.wrong))) == ("load", "", 0)
    for pool in moving.pools:
        assert all(map(torch.equal, copy_rows(pool, rows_of(3, 4)), copy_rows(pool, rows_of(1, 2))))


def test_records_are_told_when_their_copy_has_ended(moving: Moving) -> None:
    moving.engine.hold()
    move = moving.mover.begin("save", *moving.reserve())
    assert (list(moving.mover.poll()), move.fault, moving.find_kept()) == ([], None, NONE)
    moving.engine.release()
    assert moving.end() is move
    assert (moving.mover.moves, move.fault, moving.find_kept()) == ({}, "", ALL)


def test_records_that_differ_from_the_saved_bytes_are_forgotten(moving: Moving) -> None:
    moving.mover.begin("save", *moving.reserve())
    moving.end()
    parts = moving.lease(is_compared=True)
    moving.cache.record(NAMES[32:], group=1)[:1] ^= 1
    moving.mover.begin("load", parts)
    assert [places.tolist() for places in moving.end().wrong] == [[], [1]]
    assert moving.find_kept() == [[True, True], [True, False]]


def test_a_save_that_failed_or_is_not_wanted_gives_its_slots_back(moving: Moving) -> None:
    moving.mover.begin("unwanted", *moving.reserve())
    assert moving.engine.fence(60.0)
    (unwanted,) = moving.mover.poll(lambda job: job != "unwanted")
    moving.mover.engine = FailingEngine(moving.engine, CopyDirection.SAVE)
    moving.mover.begin("save", *moving.reserve())
    failed = moving.end()
    assert (unwanted.fault, failed.fault) == ("", FailingEngine.FAULT)
    assert (unwanted.is_published, failed.is_published) == (False, False)
    assert (moving.find_kept(), moving.cache.stats().reserved) == (NONE, 0)


def test_the_slots_of_a_save_that_is_refused_are_still_the_callers(moving: Moving) -> None:
    (first, second), slots = moving.reserve()
    with pytest.raises(ValueError, match="no segment"):
        moving.mover.begin("save", [first, second._replace(addresses=second.addresses + (1 << 40))], slots)
    assert (moving.mover.moves, moving.cache.stats().reserved) == ({}, 4)


RECORDS = (bytes(96), bytes(range(96)))
SUMS = np.array([[native.digest_run(one) % 2**64, native.digest_run(one) >> 64] for one in RECORDS], np.uint64)
DIGESTS = RecordDigests(FINGERPRINT, (64, 96))


def test_a_digest_is_that_of_the_records_bytes_under_its_name_group_and_shard() -> None:
    assert DIGESTS.finish(SUMS, NAMES, group=1, shard=2).tolist() == [
        native.digest_record(one, fingerprint=FINGERPRINT, block_hash=NAMES[32 * at : 32 * at + 32], group=1, shard=2)
        for at, one in enumerate(RECORDS)
    ]


def test_a_record_is_wrong_if_its_digest_is_known_and_another() -> None:
    wanted = DIGESTS.finish(SUMS, NAMES, group=1).copy()
    assert DIGESTS.find_wrong(SUMS, NAMES, wanted, group=1).tolist() == []
    assert DIGESTS.find_wrong(SUMS[::-1], NAMES, wanted, group=1).tolist() == [0, 1]
    wanted[0] = 0
    assert DIGESTS.find_wrong(SUMS[::-1], NAMES, wanted, group=1).tolist() == [1]
