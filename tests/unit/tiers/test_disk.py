"""The disk tier passes the contract, keeps what it says over restarts, and is told to be gone where it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import TierError
from kvoffload.tiers.base import RecordNames, RecordOutcome, Tier, TierState
from kvoffload.tiers.disk import DiskFolder, DiskSettings, DiskTier
from kvoffload.tiers.record_coder import Coding
from tests.kit.children import child
from tests.kit.tiers.disks import make_tier
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import FINGERPRINT, TIMEOUT_S, Records, TierContract, finish, get, hashes_of, put


class TestDiskTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = make_tier(tmp_path / "disk")
        yield tier
        tier.close()


class TestDiskTierThatAFaultyOneWears(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = make_tier(tmp_path / "disk")
        yield FaultyTier(tier)
        tier.close()


class TestDiskTierOfTwoDevicesByThreads(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = make_tier(tmp_path / "one", tmp_path / "two", io_engine="threads")
        yield tier
        tier.close()


class TestDiskTierThatSeals(TierContract):
    lists_digests = False

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = make_tier(tmp_path / "disk", seal_keys=make_keys(1))
        yield tier
        tier.close()


class TestDiskTierThatCodesAndSeals(TierContract):
    has_numbers = True
    lists_digests = False

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = make_tier(tmp_path / "disk", seal_keys=make_keys(1), compress=Coding.ON)
        yield tier
        tier.close()


def has_bytes_of(folder: Path, records: Records) -> bool:
    """Whether any file of the folder has bytes of the records."""
    parts = [row[at : at + 16].tobytes() for row in records.memory for at in range(0, records.record_bytes - 16, 500)]
    return any(part in data for data in [file.read_bytes() for file in folder.iterdir()] for part in parts)


def test_sealed_records_are_there_after_a_restart_and_none_of_their_bytes_is_in_a_file(tmp_path: Path) -> None:
    written = Records(0, 20, 20_000, filled=True)
    for name, keys in (("sealed", make_keys(1)), ("plain", None)):
        tier = make_tier(tmp_path / name, seal_keys=keys)
        assert put(tier, written, is_durable=True).count(RecordOutcome.DURABLE) == 20
        tier.close()
        assert has_bytes_of(tmp_path / name, written) == (keys is None)
        tier = make_tier(tmp_path / name, seal_keys=keys)
        read = Records(0, 20, 20_000, filled=False)
        ended = get(tier, read)
        assert ended.count(RecordOutcome.FOUND) == 20
        assert np.array_equal(read.memory, written.memory)
        assert (ended.digests.tolist(), ended.parents) == (written.digests.tolist(), written.parents)
        tier.close()


def test_a_rotated_key_still_opens_and_without_a_key_all_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path / "disk", seal_keys=make_keys(1))
    put(tier, Records(0, 5, 1000, filled=True), is_durable=True)
    tier.close()
    tier = make_tier(tmp_path / "disk", seal_keys=make_keys(2, 1))
    put(tier, Records(5, 5, 1000, filled=True), is_durable=True)
    assert get(tier, Records(0, 10, 1000, filled=False)).count(RecordOutcome.FOUND) == 10
    tier.close()
    tier = make_tier(tmp_path / "disk", seal_keys=make_keys(2))
    assert get(tier, Records(5, 5, 1000, filled=False)).count(RecordOutcome.FOUND) == 5
    assert not caplog.messages
    assert get(tier, Records(0, 5, 1000, filled=False)).count(RecordOutcome.DAMAGED) == 5
    assert get(tier, Records(0, 5, 1000, filled=False)).count(RecordOutcome.MISSING) == 5
    tier.close()
    assert [message.partition(": ")[2][:9] for message in caplog.messages] == ["5 records"]
    tier = make_tier(tmp_path / "disk")
    assert get(tier, Records(0, 10, 1000, filled=False)).count(RecordOutcome.FOUND) == 0
    assert put(tier, Records(0, 10, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 10
    assert get(tier, Records(0, 10, 1000, filled=False)).count(RecordOutcome.FOUND) == 10
    tier.close()


def test_a_record_that_is_not_sealed_is_not_read_with_a_key(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "disk")
    put(tier, Records(0, 5, 1000, filled=True), is_durable=True)
    tier.close()
    tier = make_tier(tmp_path / "disk", seal_keys=make_keys(1))
    assert get(tier, Records(0, 5, 1000, filled=False)).count(RecordOutcome.FOUND) == 0
    assert put(tier, Records(0, 5, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 5
    assert get(tier, Records(0, 5, 1000, filled=False)).count(RecordOutcome.FOUND) == 5
    tier.close()


def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    written = Records(0, 40, 20_000, filled=True)
    tier = make_tier(tmp_path / "disk")
    assert put(tier, written, is_durable=True).count(RecordOutcome.DURABLE) == 40
    gone = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(7, 1))
    tier.remove(gone, timeout_s=TIMEOUT_S)
    tier.close()
    tier = make_tier(tmp_path / "disk", may_create=False)
    read = Records(0, 40, 20_000, filled=False)
    ended = get(tier, read)
    assert ended.count(RecordOutcome.FOUND) == 39
    found = ended.outcomes == RecordOutcome.FOUND
    assert np.array_equal(read.memory[found], written.memory[found])
    assert tier.health()[0].counts["recovered_records"] >= 39
    tier.close()


def test_a_second_tier_on_the_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    first, second = make_tier(tmp_path / "disk"), make_tier(tmp_path / "disk")
    health = second.health()[0]
    assert health.state is TierState.ABSENT
    assert "another server uses it" in health.reason
    assert "\n" not in health.reason
    assert put(second, Records(0, 1, 10, filled=True)).count(RecordOutcome.UNAVAILABLE) == 1
    first.close()
    while second.health()[0].state is not TierState.READY:
        os.sched_yield()
    assert put(second, Records(0, 1, 10, filled=True)).count(RecordOutcome.WRITTEN) == 1
    second.close()


VICTIM = """
import sys
from pathlib import Path
from tests.kit.tiers.disks import make_tier
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.tier_contract import Records, put
tier = make_tier(Path(sys.argv[1]))
put(tier, Records(0, 20, 30_000, filled=True), is_durable=True)
print("durable", flush=True)
for first in range(100, 100_000):
    put(tier, Records(first, 1, 30_000, filled=True))
"""


def test_what_is_durable_survives_kill_9(tmp_path: Path) -> None:
    with child(["-c", VICTIM, str(tmp_path / "disk")], says="durable") as victim:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    tier = make_tier(tmp_path / "disk")
    read = Records(0, 20, 30_000, filled=False)
    assert get(tier, read).count(RecordOutcome.FOUND) == 20
    assert np.array_equal(read.memory, Records(0, 20, 30_000, filled=True).memory)
    tier.close()


def test_what_a_day_may_be_given_bounds_the_puts_and_nothing_else(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "disk", daily_bytes=24 << 20)  # 1 MiB an hour
    first = Records(0, 10, 50_000, filled=True)
    assert put(tier, first).count(RecordOutcome.WRITTEN) == 10
    ended = put(tier, Records(100, 40, 50_000, filled=True))
    assert 0 < ended.count(RecordOutcome.WRITTEN) < 40
    assert ended.count(RecordOutcome.OVER_BUDGET) == 40 - ended.count(RecordOutcome.WRITTEN)
    assert tier.health()[0].counts["over_budget_records"] == ended.count(RecordOutcome.OVER_BUDGET)
    assert get(tier, Records(0, 10, 50_000, filled=False)).count(RecordOutcome.FOUND) == 10
    assert finish(tier, tier.remove(first.names, timeout_s=TIMEOUT_S)).count(RecordOutcome.REMOVED) == 10
    tier.close()
    # A restart gives nothing: what was written before is not known.
    tier = make_tier(tmp_path / "disk", daily_bytes=24 << 20)
    assert put(tier, Records(200, 1, 50_000, filled=True)).count(RecordOutcome.OVER_BUDGET) == 1
    tier.close()


def test_settings_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="4 segments"):
        DiskTier(DiskSettings(folders=[DiskFolder(path=tmp_path, capacity_bytes=1 << 20)]))
    with pytest.raises(TierError, match="at least one device"):
        DiskTier(DiskSettings(folders=[]))
    with pytest.raises(TierError, match="auto, io_uring or threads"):
        make_tier(tmp_path / "disk", io_engine="aio")


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "disk")
    records = Records(0, 2, 10, filled=True)
    with pytest.raises(TierError, match="slots must be one for each record"):
        tier.get(records.names, records.slots[:1], record_bytes=10, timeout_s=1.0)
    with pytest.raises(TierError, match="digests must be one for each record"):
        tier.put(replace(records.batch(), digests=records.digests[:1]), timeout_s=1.0)
    assert str(tier) == f"32MiB of disk in {tmp_path / 'disk'}"
    tier.close()
