"""Records by slot: what was written comes back, or a fault that says which slot, at an address that stays."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvoffload.cache.plain_records import PlainRecords, Record, check_digests
from kvoffload.errors import StorageError


def write(records: PlainRecords, *slots: int, digests: list[int] | None = None, value: int = 0) -> list[Record]:
    """16 bytes each, all of the slot's number or of `value`."""
    written = records.reserve(slots, [16] * len(slots))
    for record in written:
        record.memory[:] = value or record.slot
    records.commit(written, digests)
    return written


def test_records_come_back_by_slot_in_the_order_asked() -> None:
    records = PlainRecords()
    write(records, 7, 3)
    assert [record.memory.tolist() for record in records.acquire([3, 7], [16, 16])] == [[3] * 16, [7] * 16]


def test_a_record_is_where_it_says() -> None:
    (record,) = PlainRecords().reserve([1], [16])
    record.memory[:] = range(16)
    assert record.address == record.memory.ctypes.data


def test_nobody_finds_a_record_before_it_is_written() -> None:
    records = PlainRecords()
    reserved = records.reserve([5], [16])
    with pytest.raises(StorageError, match="slot 5 holds no record") as fault:
        records.acquire([5], [16])
    assert fault.value.context["slot"] == 5
    assert len(records) == 0
    records.commit(reserved)
    assert records.acquire([5], [16]) == reserved


def test_a_record_of_another_size_is_not_read() -> None:
    """The engine's cache was made anew with other pages: a copy would read beyond the record."""
    records = PlainRecords()
    write(records, 0, 1)
    with pytest.raises(StorageError, match="slot 1 holds 16 bytes, a record here has 32"):
        records.acquire([0, 1], [16, 32])


def test_a_dropped_record_lives_as_long_as_somebody_copies_from_it() -> None:
    records = PlainRecords()
    write(records, 0)
    (held,) = records.acquire([0], [16])
    memory = weakref.ref(held.memory)
    records.drop([0])
    with pytest.raises(StorageError):
        records.acquire([0], [16])
    gc.collect()
    assert held.memory.tolist() == [0] * 16
    del held
    assert memory() is None


def test_a_slot_that_is_written_again_has_other_memory_and_readers_keep_theirs() -> None:
    records = PlainRecords()
    (old,) = write(records, 4, digests=[1])
    (new,) = write(records, 4, digests=[2], value=9)
    assert old.address != new.address
    assert (old.memory[0], new.memory[0]) == (4, 9)
    assert records.acquire([4], [16]) == [new]


def test_each_record_has_memory_of_its_own() -> None:
    """Dropping one of many that were written together gives its memory back."""
    assert all(record.memory.base is None for record in write(PlainRecords(), 0, 1))


def test_a_record_that_is_not_what_was_written_is_named() -> None:
    records = PlainRecords()
    written = write(records, 0, 1, digests=[10, 1 << 100])
    check_digests(written, [10, 1 << 100])
    with pytest.raises(StorageError, match="slot 1 does not hold what was written to it") as fault:
        check_digests(written, [10, 1 << 101])
    assert fault.value.context["slot"] == 1


def test_what_has_no_digest_is_believed() -> None:
    check_digests(write(PlainRecords(), 3), [77])


def test_dropped_records_are_gone_and_unknown_slots_are_fine() -> None:
    records = PlainRecords()
    write(records, 0, 1)
    records.drop([0, 99])
    assert len(records) == 1
    records.clear()
    assert len(records) == 0


def test_as_many_sizes_as_slots() -> None:
    records = PlainRecords()
    with pytest.raises(ValueError, match="zip"):
        records.reserve([0], [1, 2])
    with pytest.raises(ValueError, match="zip"):
        records.acquire([], [1])
