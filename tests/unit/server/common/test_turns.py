"""Users take turns, however much one of them wants."""

from __future__ import annotations

import pytest

from kvoffload.server.common.turns import Turns


def test_each_user_has_a_turn_before_the_first_has_another() -> None:
    turns = Turns[str]()
    for wanted in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.add(wanted[0], wanted)
    taken = []
    while turns:
        owner, wanted = turns.take()
        assert owner == wanted[0]
        taken.append(wanted)
    assert taken == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_who_comes_later_waits_for_one_thing_of_each_other_user() -> None:
    turns = Turns[str]()
    for number in range(100):
        turns.add("a", f"a{number}")
    turns.take()
    turns.add("b", "b0")
    assert [turns.take()[1] for _ in range(2)] == ["a1", "b0"]


def test_where_nothing_is_wanted_nothing_can_be_taken() -> None:
    turns = Turns[str]()
    with pytest.raises(IndexError):
        turns.take()
    turns.add("a", "a1")
    turns.take()
    assert not turns
