"""What benchmarks of tiers move, and how they notice that it did not move."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.bench.tier_load import Records, get_all, put_all
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import RecordOutcome
from tests.unit.tiers.memory_tier import MemoryTier


def make_records() -> Records:
    return Records(4096, 40, np.random.default_rng(1).integers(0, 256, 40 * 4096, np.uint8))


def test_all_of_them_go_and_come_back() -> None:
    tier, records = MemoryTier(), make_records()
    wanted = records.memory.copy()
    assert put_all(tier, records) > 0
    records.memory[:] = 0
    assert get_all(tier, records, np.arange(40)) > 0
    assert np.array_equal(records.memory, wanted)
    put_all(tier, records)
    assert tier.health()[0].records == 80, "each round has names of its own"


def test_a_batch_that_ends_otherwise_is_no_measurement() -> None:
    with pytest.raises(BenchmarkError, match=f"{int(RecordOutcome.MISSING)}.*not FOUND"):
        get_all(MemoryTier(), make_records(), np.arange(4))
