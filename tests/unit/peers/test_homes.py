"""Homes are the same everywhere, evenly spread, and move only with the members that come and go."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.peers.homes import find_homes

HASHES = b"".join(hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(20_000))


def names_of(count: int) -> tuple[str, ...]:
    return tuple(f"tcp://10.0.0.{at}:5555" for at in range(count))


GOLDEN = [4, 3, 2, 3, 3, 0, 3, 0, 0, 4, 2, 1, 1, 4, 3, 0, 1, 2, 0, 1, 1, 1, 4, 2]


def test_homes_are_what_they_were_in_the_first_version() -> None:
    assert find_homes(names_of(5), HASHES[: 32 * 24]).tolist() == GOLDEN


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_every_member_has_about_its_share(count: int) -> None:
    shares = np.bincount(find_homes(names_of(count), HASHES), minlength=count) / (len(HASHES) // 32) * count
    assert 0.7 < shares.min() <= shares.max() < 1.35


@settings(max_examples=20)
@given(st.integers(2, 20), st.data())
def test_only_records_of_a_member_that_goes_move(count: int, data: st.DataObject) -> None:
    members = names_of(count)
    gone = data.draw(st.integers(0, count - 1))
    left = members[:gone] + members[gone + 1 :]
    before = np.array(members)[find_homes(members, HASHES)]
    after = np.array(left)[find_homes(left, HASHES)]
    stays = before != members[gone]
    assert (before[stays] == after[stays]).all()


def test_nothing_has_no_home() -> None:
    assert find_homes(names_of(3), b"").tolist() == []
