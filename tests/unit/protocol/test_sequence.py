"""Numbered messages: in order or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.protocol import Arrival, InboundSequence
from kvoffload.protocol.fields import U64_MAX


@given(st.integers(0, 50))
def test_numbers_in_order_are_accepted(count: int) -> None:
    sequence = InboundSequence()
    assert [sequence.accept(number) for number in range(1, count + 1)] == [Arrival.IN_ORDER] * count
    assert sequence.received == count
    assert not sequence.is_broken


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([2], Arrival.GAP),
        ([0], Arrival.DUPLICATE),
        ([1, 1], Arrival.DUPLICATE),
        ([1, 2, 1], Arrival.DUPLICATE),
        ([1, 3], Arrival.GAP),
        ([1, 2**64], Arrival.OVERFLOW),
    ],
)
def test_any_other_breaks_the_sequence_for_good(numbers: list[int], expected: Arrival) -> None:
    sequence = InboundSequence()
    assert [sequence.accept(number) for number in numbers][-1] is expected
    assert sequence.is_broken
    received = sequence.received
    for number in (received + 1, received, received + 2, 1):
        assert sequence.accept(number) is expected
    assert sequence.received == received


def test_the_last_number_is_the_last() -> None:
    sequence = InboundSequence(first=U64_MAX)
    assert sequence.accept(U64_MAX) is Arrival.IN_ORDER
    assert sequence.accept(U64_MAX + 1) is Arrival.OVERFLOW
    wrapped = InboundSequence(first=7, last=7)
    assert [wrapped.accept(7), wrapped.accept(0)] == [Arrival.IN_ORDER, Arrival.DUPLICATE]


def test_a_queue_without_room_breaks_it_too() -> None:
    sequence = InboundSequence()
    sequence.accept(1)
    assert sequence.overflow() is Arrival.OVERFLOW
    assert sequence.accept(2) is Arrival.OVERFLOW


def test_what_broke_it_first_is_what_is_told() -> None:
    sequence = InboundSequence()
    sequence.accept(5)
    assert sequence.overflow() is Arrival.GAP


@given(st.lists(st.integers(0, 6), max_size=12))
def test_accepted_are_exactly_the_longest_run_from_the_start(numbers: list[int]) -> None:
    sequence = InboundSequence()
    accepted = [number for number in numbers if sequence.accept(number) is Arrival.IN_ORDER]
    expected = []
    for number in numbers:
        if number != len(expected) + 1:
            break
        expected.append(number)
    assert accepted == expected
