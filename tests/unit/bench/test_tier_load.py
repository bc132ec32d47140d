"""Records that benchmarks of tiers move, and how they notice that a record did not move."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.bench.tier_load import Records, as_a_server, get_all, put_all
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.base import RecordOutcome
from kvoffload.units import MIB
from tests.kit.tiers.memory_tier import MemoryTier


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


@pytest.mark.parametrize(
    ("record_bytes", "batch", "at_once"),
    [(MIB, 8, 8), (16 * MIB, 1, 4), (100 * MIB, 1, 1), (64 << 10, 128, 8)],
)
def test_batches_are_those_of_a_server(record_bytes: int, batch: int, at_once: int) -> None:
    records = as_a_server(record_bytes, 4, np.empty(0, np.uint8))
    assert (records.batch_records, records.batches_at_once) == (batch, at_once)
