"""Lengths of a prompt that can be restored from the pages that are held."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.cache import LeasedGroup
from kvoffload.sglang.held_pages import HeldPages, PoolSettings, list_lengths

ALL = PoolSettings(record_bytes=8, page_rows=4)
WINDOW = PoolSettings(record_bytes=8, page_rows=4, trailing_pages=2)
STATE = PoolSettings(record_bytes=8, page_rows=1, trailing_pages=1)


def there(marks: str) -> np.ndarray:
    return np.array([mark == "x" for mark in marks], np.bool_)


@pytest.mark.parametrize(
    ("settings", "marks", "lengths"),
    [
        ([ALL], ["xxx"], [1, 2, 3]),
        ([ALL], ["xx."], [1, 2]),
        ([ALL], [".xx"], []),
        ([ALL, WINDOW], ["xxxxxx", "xxxxxx"], [1, 2, 3, 4, 5, 6]),
        ([ALL, WINDOW], ["xxxxxx", "....xx"], [6]),
        ([ALL, WINDOW], ["xxxxxx", ".xx.xx"], [3, 6]),
        ([ALL, WINDOW], ["xxxx..", ".xx.xx"], [3]),
        ([ALL, WINDOW], ["xxxxxx", "x....."], [1]),
        ([ALL, STATE], ["xxxx", ".x.x"], [2, 4]),
        ([ALL, WINDOW, STATE], ["xxxx", "xxxx", ".x.x"], [2, 4]),
        ([ALL, WINDOW], ["", ""], []),
    ],
)
def test_a_length_has_what_each_group_needs_at_its_end(
    settings: list[PoolSettings], marks: list[str], lengths: list[int]
) -> None:
    assert list_lengths(settings, [there(one) for one in marks]) == lengths


def test_leases_are_laid_over_the_positions_of_a_prompt() -> None:
    held = HeldPages.of(4, LeasedGroup(2, np.array([7, 8], np.uint64), np.array([[5, 6]], np.uint64)))
    held.add(np.array([0]), LeasedGroup(0, np.array([9], np.uint64), np.empty((0, 1), np.uint64)))
    assert held.is_held.tolist() == [True, False, True, True]
    assert held.addresses.tolist() == [9, 0, 7, 8]
    assert held.digests.tolist() == [0, 0, 5, 6]


def test_what_a_length_needs_begins_at_the_first_page_at_the_earliest() -> None:
    assert [ALL.first_needed(5), WINDOW.first_needed(5), WINDOW.first_needed(1)] == [0, 3, 0]
