"""Slots as the servers' own documents give them, and what servers tell of their cluster."""

from __future__ import annotations

import pytest

from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import Answer
from kvoffload.tiers.valkey_slots import read_slots, slot_of

ASKED = ("10.0.0.1", 7000)


def test_slots_are_those_of_the_cluster_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar"), "empty braces do not count"
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
    assert slot_of(b"foo{bar}{zap}") == slot_of(b"bar")


def test_a_map_says_whose_a_slot_is() -> None:
    answer: Answer = [
        [5000, 16383, [b"10.0.0.2", 7001, b"id"], [b"10.0.0.3", 7002, b"id"]],
        [0, 4000, [b"", 7000, b"id", [b"hostname", b"far"]]],
    ]
    slots = read_slots(answer, ASKED)
    assert slots.find(0) == slots.find(4000) == ASKED
    assert slots.find(5000) == slots.find(16383) == ("10.0.0.2", 7001)
    assert slots.primaries == (ASKED, ("10.0.0.2", 7001))
    assert slots.nodes == (ASKED, ("10.0.0.2", 7001), ("10.0.0.3", 7002))
    with pytest.raises(StoreFaultError, match="no node for slot 4500"):
        slots.find(4500)


@pytest.mark.parametrize("answer", [None, 5, [], [[0, 1]], [[0, b"1", [b"", 1]]], [[0, 1, b"far"]], [[0, 1, [b""]]]])
def test_nonsense_is_a_fault(answer: Answer) -> None:
    with pytest.raises(StoreFaultError):
        read_slots(answer, ASKED)
