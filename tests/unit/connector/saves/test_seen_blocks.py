"""A bounded memory of what was seen once."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.connector.saves.seen_blocks import SeenBlocks

USERS = map(str, count())


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_the_second_time_is_known() -> None:
    seen = SeenBlocks(100)
    assert not seen.see(0, name(1), "first")
    assert seen.see(0, name(1), "second")
    assert seen.see(0, name(1), "third")


def test_who_uses_a_block_again_is_not_a_second_user() -> None:
    seen = SeenBlocks(100)
    assert [seen.see(0, name(1), "first") for _ in range(3)] == [False] * 3
    assert [seen.see(0, name(1), "second") for _ in range(3)] == [True] * 3
    assert not seen.see(0, name(1), "first")


def test_the_first_user_is_known_for_as_long_as_the_block() -> None:
    seen = SeenBlocks(10)
    for number in range(100):
        seen.see(0, name(number), next(USERS))
        assert not seen.see(0, name(1000), "first")
    assert seen.see(0, name(1000), "second")


def test_a_hash_is_another_block_in_another_group() -> None:
    seen = SeenBlocks(100)
    assert [seen.see(group, name(1), next(USERS)) for group in (0, 1, 2)] == [False] * 3
    assert [seen.see(group, name(1), next(USERS)) for group in (0, 1, 2)] == [True] * 3


def test_all_of_a_hash_counts() -> None:
    seen = SeenBlocks(10_000)
    names = [bytes(place) + b"\1" + bytes(31 - place) for place in range(32)]
    assert not any(seen.see(0, one, next(USERS)) for one in names)


@pytest.mark.parametrize(("others", "is_known"), [(0, True), (4, True), (9, True), (10, False), (100, False)])
def test_after_enough_others_it_is_new_again(others: int, is_known: bool) -> None:
    seen = SeenBlocks(10)
    seen.see(0, name(0), next(USERS))
    for number in range(1, others + 1):
        seen.see(0, name(number), next(USERS))
    assert seen.see(0, name(0), next(USERS)) is is_known


def test_what_is_used_goes_on_being_remembered() -> None:
    seen = SeenBlocks(10)
    seen.see(0, name(0), next(USERS))
    for number in range(1, 200):
        seen.see(0, name(number), next(USERS))
        if number % 3 == 0:
            assert seen.see(0, name(0), next(USERS))


def test_forgetting_all_makes_everything_new() -> None:
    seen = SeenBlocks(10)
    for number in range(8):
        seen.see(0, name(number), next(USERS))
    seen.forget_all()
    assert len(seen) == 0
    assert not any(seen.see(0, name(number), next(USERS)) for number in range(5))


@given(st.integers(2, 30), st.lists(st.integers(0, 40), max_size=300))
def test_it_never_holds_more_and_never_knows_less_than_half(limit: int, numbers: list[int]) -> None:
    seen = SeenBlocks(limit)
    last: list[int] = []
    for number in numbers:
        was_seen = seen.see(0, name(number), next(USERS))
        assert len(seen) <= limit
        assert not was_seen or number in last
        assert was_seen or number not in last[-(limit // 2) :]
        last = [other for other in last if other != number] + [number]
