"""The contract of every tier: one list of tests, run on each kind by a class that makes one."""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from kvoffload import native
from kvoffload.errors import TierError
from kvoffload.tiers.base import FinishedBatch, RecordBatch, RecordNames, RecordOutcome, Ticket, Tier, TierState

FINGERPRINT = b"F" * 32
TIMEOUT_S = 60.0


def hashes_of(first: int, count: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(first, first + count))


class Records:
    """Memory for records of one size, their names, and what they hold when they are made to be put: bytes at random,
    or numbers in bfloat16, which become shorter when they are coded."""

    def __init__(
        self, first: int, count: int, record_bytes: int, *, filled: bool, group: int = 0, has_numbers: bool = False
    ) -> None:
        self.record_bytes = record_bytes
        self.names = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(first, count), group=group)
        self.parents = hashes_of(first + 1000, count)
        self.memory = np.zeros((count, record_bytes), np.uint8)
        if filled:
            for i in range(count):
                drawn = np.random.default_rng([first + i, group])
                if has_numbers:
                    numbers = drawn.normal(size=record_bytes // 2 + 1).astype(np.float32).view(np.uint16)[1::2]
                    self.memory[i] = np.frombuffer(numbers.tobytes(), np.uint8)[:record_bytes]
                else:
                    self.memory[i] = drawn.integers(0, 256, record_bytes, np.uint8)
        self.slots = np.uint64(self.memory.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(record_bytes)
        self.digests = np.frombuffer(
            native.digest_records(
                self.memory.reshape(-1),
                record_bytes,
                fingerprint=FINGERPRINT,
                block_hashes=self.names.hashes,
                group=group,
                shard=0,
            ),
            np.uint64,
        )

    def batch(self, *, is_durable: bool = False) -> RecordBatch:
        """Returns all of them, to be put."""
        return RecordBatch(
            self.names,
            self.slots,
            record_bytes=self.record_bytes,
            digests=self.digests,
            parents=self.parents,
            is_durable=is_durable,
        )


def finish(tier: Tier, ticket: Ticket | None) -> FinishedBatch:
    assert ticket is not None
    while True:
        ended = tier.poll()
        if ended:
            assert [batch.ticket for batch in ended] == [ticket]
            return ended[0]
        assert select.select([tier], [], [], TIMEOUT_S)[0]


def put(tier: Tier, records: Records, *, is_durable: bool = False) -> FinishedBatch:
    return finish(tier, tier.put(records.batch(is_durable=is_durable), timeout_s=TIMEOUT_S))


def get(tier: Tier, records: Records) -> FinishedBatch:
    return finish(tier, tier.get(records.names, records.slots, record_bytes=records.record_bytes, timeout_s=TIMEOUT_S))


def get_all(tier: Tier, records: Records) -> FinishedBatch:
    """Gets all records of a tier that is not patient: on a busy machine it may be late now and then."""
    end_s = time.monotonic() + TIMEOUT_S
    while (ended := get(tier, records)).count(RecordOutcome.FOUND) < len(records.names):
        assert time.monotonic() < end_s, ended.outcomes
        time.sleep(0.01)
    return ended


def look(tier: Tier, names: RecordNames) -> list[bool]:
    ended = finish(tier, tier.look(names, timeout_s=TIMEOUT_S))
    assert ended.count(RecordOutcome.FOUND) + ended.count(RecordOutcome.MISSING) == len(names)
    found = ended.outcomes == RecordOutcome.FOUND
    known = tier.contains(names)
    assert np.array_equal(known, found) if tier.knows_all else not (known & ~found).any()
    return list(map(bool, found))


class TierContract:
    """A subclass has a fixture `tier`, an empty one of at least 16 MiB."""

    has_numbers = False
    """Whether records that are found again are such as a tier may code."""

    knows_parents = True
    """False: the tier does not know the parents of blocks that it finds."""
    lists_digests = True
    """False: a scan does not tell digests, because they are sealed."""
    is_listed = True
    """False: a scan reports that it is not possible."""
    drops_the_oldest = True
    """False: any record may be dropped, because Valkey gives records used in the same second one age."""

    @pytest.mark.parametrize("record_bytes", [1, 4096, 65536, 300_001])
    def test_what_is_put_is_found(self, tier: Tier, record_bytes: int) -> None:
        written = Records(0, 5, record_bytes, filled=True, has_numbers=self.has_numbers)
        assert put(tier, written).count(RecordOutcome.WRITTEN) == 5
        read = Records(0, 6, record_bytes, filled=False)
        ended = get(tier, read)
        assert ended.outcomes.tolist() == [RecordOutcome.FOUND] * 5 + [RecordOutcome.MISSING]
        assert np.array_equal(read.memory[:5], written.memory)
        assert ended.digests[:5].tolist() == written.digests.tolist()
        assert ended.parents[: 5 * 32] == (written.parents if self.knows_parents else bytes(5 * 32))

    def test_durable_is_said_when_it_is_asked_for(self, tier: Tier) -> None:
        records = Records(0, 3, 5000, filled=True)
        assert put(tier, records, is_durable=True).count(RecordOutcome.DURABLE) == 3
        assert put(tier, records, is_durable=True).count(RecordOutcome.DURABLE) == 3

    def test_a_name_is_all_its_parts(self, tier: Tier) -> None:
        put(tier, Records(0, 1, 100, filled=True, group=1))
        assert get(tier, Records(0, 1, 100, filled=False, group=1)).count(RecordOutcome.FOUND) == 1
        assert get(tier, Records(0, 1, 100, filled=False, group=2)).count(RecordOutcome.MISSING) == 1
        assert get(tier, Records(0, 1, 101, filled=False, group=1)).count(RecordOutcome.MISSING) == 1

    def test_a_record_without_its_digest_is_not_stored(self, tier: Tier) -> None:
        records = Records(0, 3, 5000, filled=True, has_numbers=self.has_numbers)
        records.memory[1, 4321] ^= 16
        ended = put(tier, records)
        assert ended.outcomes.tolist() == [RecordOutcome.WRITTEN, RecordOutcome.DAMAGED, RecordOutcome.WRITTEN]
        assert look(tier, records.names) == [True, False, True]

    def test_removed_is_gone(self, tier: Tier) -> None:
        put(tier, Records(0, 4, 500, filled=True))
        some = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(1, 2) + hashes_of(77, 1))
        ended = finish(tier, tier.remove(some, timeout_s=TIMEOUT_S))
        assert ended.outcomes.tolist() == [RecordOutcome.REMOVED, RecordOutcome.REMOVED, RecordOutcome.MISSING]
        everything = Records(0, 4, 500, filled=False)
        assert look(tier, everything.names) == [True, False, False, True]
        assert get(tier, everything).count(RecordOutcome.FOUND) == 2

    def test_an_empty_batch_ends(self, tier: Tier) -> None:
        assert len(get(tier, Records(0, 0, 10, filled=False)).outcomes) == 0

    def test_a_scan_lists_all_that_is_there(self, tier: Tier) -> None:
        records = Records(0, 30, 700, filled=True)
        put(tier, records)
        if not self.is_listed:
            with pytest.raises(TierError, match="list"):
                tier.scan(timeout_s=TIMEOUT_S)
            return
        finish(tier, tier.remove(RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(3, 1)), timeout_s=TIMEOUT_S))
        listed: dict[bytes, int] = {}
        cursor, is_over = 0, False
        while not is_over:
            page = tier.scan(cursor, timeout_s=TIMEOUT_S)
            assert page.fingerprints == FINGERPRINT * len(page)
            assert page.record_bytes.tolist() == [700] * len(page)
            listed |= {page.hashes[32 * i : 32 * i + 32]: int(page.digests[i]) for i in range(len(page))}
            cursor, is_over = page.cursor, page.cursor == 0
        digests = records.digests if self.lists_digests else np.zeros_like(records.digests)
        wanted = {hashes_of(i, 1): int(digests[i]) for i in range(30) if i != 3}
        assert listed == wanted

    @pytest.mark.parametrize("verb", ["put", "get", "look", "remove"])
    def test_a_timeout_that_is_over_ends_the_batch(self, tier: Tier, verb: str) -> None:
        stored = Records(0, 4, 5000, filled=True)
        put(tier, stored)
        records = Records(10 if verb == "put" else 0, 4, 5000, filled=verb == "put")
        if verb == "remove":
            ticket = tier.remove(records.names, timeout_s=0.0)
        elif verb == "look":
            ticket = tier.look(records.names, timeout_s=0.0)
        elif verb == "get":
            ticket = tier.get(records.names, records.slots, record_bytes=5000, timeout_s=0.0)
        else:
            ticket = tier.put(replace(records.batch(is_durable=True), parents=b""), timeout_s=0.0)
        in_time = {"put": RecordOutcome.DURABLE, "remove": RecordOutcome.REMOVED}.get(verb, RecordOutcome.FOUND)
        ended = finish(tier, ticket)
        assert set(ended.outcomes.tolist()) <= {in_time, RecordOutcome.LATE}, (ended.outcomes, tier.health())
        told = records.memory.copy()
        again = Records(0, 4, 5000, filled=False)
        left = get(tier, again).count(RecordOutcome.FOUND)
        assert left == 4 or verb == "remove"
        assert np.array_equal(records.memory, told), "a slot was touched after its batch had ended"

    def test_more_than_the_capacity_is_never_there(self, tier: Tier) -> None:
        if not tier.capacity_bytes:
            return  # The tier does not set its own bound.
        count, record_bytes = 16, 65536
        last = tier.capacity_bytes * 2 // (count * record_bytes)
        for first in range(last):
            ended = put(tier, Records(first * count, count, record_bytes, filled=True))
            assert ended.count(RecordOutcome.WRITTEN) == count
            assert sum(one.used_bytes for one in tier.health()) <= tier.capacity_bytes
        written = Records((last - 1) * count, count, record_bytes, filled=True)
        read = Records((last - 1) * count, count, record_bytes, filled=False)
        ended = get(tier, read)
        found = ended.outcomes == RecordOutcome.FOUND
        assert found.all() if self.drops_the_oldest else found.any()
        assert ended.count(RecordOutcome.MISSING) == np.count_nonzero(~found)
        assert np.array_equal(read.memory[found], written.memory[found])

    def test_a_scan_without_time_answers_or_says_so(self, tier: Tier) -> None:
        put(tier, Records(0, 3, 700, filled=True))
        with suppress(TierError):
            assert len(tier.scan(timeout_s=0.0)) <= 3
        if not self.is_listed:
            return
        assert len(tier.scan(timeout_s=TIMEOUT_S)) <= 3

    def test_batches_are_bounded(self, tier: Tier) -> None:
        records = Records(0, 1, 10, filled=False)
        taken = 0
        while tier.get(records.names, records.slots, record_bytes=10, timeout_s=TIMEOUT_S) is not None:
            taken += 1
            assert taken <= 4096
        left = taken
        while left:
            assert select.select([tier], [], [], TIMEOUT_S)[0]
            left -= len(tier.poll())
        assert tier.get(records.names, records.slots, record_bytes=10, timeout_s=TIMEOUT_S) is not None

    def test_health_is_told(self, tier: Tier) -> None:
        put(tier, Records(0, 3, 5000, filled=True))
        health = tier.health()
        assert [one.state for one in health] == [TierState.READY] * len(health)
        assert sum(one.capacity_bytes for one in health) <= tier.capacity_bytes

    def test_a_closed_tier_says_so(self, tier: Tier) -> None:
        records = Records(0, 1, 10, filled=False)
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.get(records.names, records.slots, record_bytes=10, timeout_s=TIMEOUT_S)
        with pytest.raises(TierError, match="closed"):
            tier.look(records.names, timeout_s=TIMEOUT_S)


Tiers = Iterator[Tier]
