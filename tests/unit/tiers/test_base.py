"""The contract on the simplest tier, and on one that goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.errors import TierError
from kvoffload.tiers.base import RecordNames, RecordOutcome, Tier
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import Records, TierContract, get, put


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(16 << 20)


class TestFaultyTierWithoutFaults(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return FaultyTier(MemoryTier(16 << 20))


def test_faults_are_of_single_records_and_of_any_kind() -> None:
    inner = MemoryTier()
    faulty: Tier = FaultyTier(inner, lambda verb, i: RecordOutcome.FAILED if (verb, i) == ("put", 1) else None)
    records = Records(0, 4, 100, filled=True)
    assert put(faulty, records).outcomes.tolist() == [2, RecordOutcome.FAILED, 2, 2]
    assert inner.contains(records.names).tolist() == [True, False, True, True]
    late: Tier = FaultyTier(inner, lambda verb, i: RecordOutcome.LATE if i in (0, 3) else None)
    read = Records(0, 4, 100, filled=False)
    assert get(late, read).outcomes.tolist() == [
        RecordOutcome.LATE,
        RecordOutcome.MISSING,
        RecordOutcome.FOUND,
        RecordOutcome.LATE,
    ]
    assert np.array_equal(read.memory[2], records.memory[2])
    assert not read.memory[0].any()


def test_names_have_whole_hashes() -> None:
    assert len(RecordNames(fingerprint=bytes(32), hashes=bytes(96))) == 3
    with pytest.raises(TierError, match="31 bytes"):
        RecordNames(fingerprint=bytes(31), hashes=b"")
    with pytest.raises(TierError, match="hashes of 33"):
        RecordNames(fingerprint=bytes(32), hashes=bytes(33))


def test_some_names_are_chosen_and_all_of_them_are_the_same_names() -> None:
    names = RecordNames(fingerprint=bytes(32), hashes=b"a" * 32 + b"b" * 32 + b"c" * 32, group=1, shard=2)
    some = RecordNames(fingerprint=bytes(32), hashes=b"a" * 32 + b"c" * 32, group=1, shard=2)
    assert names.choose(np.array([True, False, True])) == some
    assert names.choose(np.array([False, False, False])) == RecordNames(
        fingerprint=bytes(32), hashes=b"", group=1, shard=2
    )
    assert names.choose(np.array([True, True, True])) is names
    assert names.part(slice(0, 3)) is names
    assert names.part(slice(1, 3)).hashes == b"b" * 32 + b"c" * 32
