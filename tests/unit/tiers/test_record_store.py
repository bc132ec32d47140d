"""Parts that all stores share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames
from kvoffload.tiers.record_store import (
    FoundRecords,
    SlotStore,
    StoreFacts,
    StoreFaultError,
    fill_slot,
    one_line,
    view_slot,
)


class EmptyStore(SlotStore):
    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        raise NotImplementedError

    def look(self, keys: Sequence[bytes], *, is_use: bool = False) -> list[bool]:
        return [False] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def probe(self) -> StoreFacts:
        return StoreFacts()

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_store_that_cannot_list_says_so() -> None:
    with pytest.raises(StoreFaultError, match="does not list"):
        EmptyStore().scan(0, 10)


def test_what_a_store_does_not_say_is_nothing() -> None:
    facts = EmptyStore().probe()
    assert (facts.capacity_bytes, facts.used_bytes, facts.values) == (0, 0, 0)


@pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
def test_a_slot_is_filled_and_nothing_beside_it(size: int) -> None:
    memory, data = np.zeros(size + 2, np.uint8), bytes(range(1, 251)) * (size // 250 + 1)
    fill_slot(memory.ctypes.data + 1, memoryview(data)[:size])
    assert memory.tobytes() == b"\0" + data[:size] + b"\0"


def test_a_slot_is_seen_and_written_where_it_lies() -> None:
    memory = np.arange(100, dtype=np.uint8)
    view = view_slot(memory.ctypes.data + 10, 5)
    assert bytes(view) == bytes(range(10, 15))
    view[:] = b"kvkvk"
    assert memory[9:16].tobytes() == b"\x09kvkvk\x0f"
    assert view.format == "B"


def test_what_a_store_says_is_one_line_of_letters_that_can_be_printed() -> None:
    assert (
        one_line("ERR no\n2026 an entry of a log\x1b[2J\u202e \udc80\x85end") == "ERR no 2026 an entry of a log [2J end"
    )
    assert len(one_line("x" * 10_000)) == 300
