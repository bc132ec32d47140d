"""Records by slot: what was written comes back, or a fault that says which slot."""

from __future__ import annotations

import pytest
import torch

from kvoffload.cache.plain_records import PlainRecords
from kvoffload.errors import StorageError


def rows(*values: int) -> torch.Tensor:
    return torch.tensor([[value] * 16 for value in values], dtype=torch.uint8)


@pytest.mark.parametrize("has_digests", [False, True])
def test_records_come_back_by_slot_in_the_order_asked(has_digests: bool) -> None:
    records = PlainRecords(has_digests=has_digests)
    records.write([7, 3], rows(70, 30))
    assert [record.tolist() for record in records.read([3, 7])] == [[30] * 16, [70] * 16]


def test_a_record_is_a_copy_of_what_was_written() -> None:
    records = PlainRecords(has_digests=True)
    given = rows(1)
    records.write([0], given)
    given.fill_(9)
    assert records.read([0])[0].tolist() == [1] * 16


def test_each_record_has_memory_of_its_own() -> None:
    """Dropping one of many that were written together gives its memory back."""
    records = PlainRecords(has_digests=False)
    records.write([0, 1], rows(1, 2))
    assert all(record.untyped_storage().nbytes() == 16 for record in records.read([0, 1]))


def test_a_slot_that_holds_nothing_is_a_fault_with_its_number() -> None:
    records = PlainRecords(has_digests=False)
    with pytest.raises(StorageError, match="slot 5 holds no record") as fault:
        records.read([5])
    assert fault.value.context["slot"] == 5


def test_a_flipped_bit_is_found_when_records_have_digests() -> None:
    records = PlainRecords(has_digests=True)
    records.write([0, 1], rows(1, 2))
    records.read([1])[0][3] ^= 1
    assert records.read([0])[0].tolist() == [1] * 16
    with pytest.raises(StorageError, match="slot 1 does not hold what was written"):
        records.read([0, 1])


def test_a_record_that_is_written_again_has_a_new_digest() -> None:
    records = PlainRecords(has_digests=True)
    records.write([0], rows(1))
    records.write([0], rows(2))
    assert records.read([0])[0].tolist() == [2] * 16


def test_dropped_records_are_gone_and_unknown_slots_are_fine() -> None:
    records = PlainRecords(has_digests=True)
    records.write([0, 1], rows(1, 2))
    records.drop([0, 99])
    assert len(records) == 1
    with pytest.raises(StorageError):
        records.read([0])
    records.clear()
    assert len(records) == 0


def test_as_many_rows_as_slots() -> None:
    with pytest.raises(ValueError, match="zip"):
        PlainRecords(has_digests=False).write([0], rows(1, 2))
