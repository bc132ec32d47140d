"""Values of the contract."""

from __future__ import annotations

import numpy as np

from kvoffload.cache import ReservedSlots


def test_slots_are_cut_like_arrays() -> None:
    slots = ReservedSlots(1, 3, 2, np.array([5, 0, 7], np.uint64), np.array([50, 0, 70], np.uint64))
    assert len(slots) == 3
    granted = slots[slots.tickets != 0]
    assert (granted.memory_id, granted.session, granted.group) == (1, 3, 2)
    assert (granted.tickets.tolist(), granted.addresses.tolist()) == ([5, 7], [50, 70])
    assert slots[1:].addresses.tolist() == [0, 70]
