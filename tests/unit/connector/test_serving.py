"""The reasons for which nothing is saved or restored, which of them an event ends, and when an idle engine may rest."""

from __future__ import annotations

from itertools import product

import pytest

from kvoffload.connector.serving import (
    ENDING_S,
    JOIN_WAIT_S,
    LEFT_WAIT_S,
    Event,
    Overtime,
    Serving,
    Stop,
)


def after(*events: Event) -> Serving:
    serving = Serving()
    for event in events:
        serving.note(event)
    return serving


def test_it_serves_from_the_start_and_every_stop_is_in_the_table() -> None:
    assert Serving().is_on
    assert {event.value[1] for event in Event} == {None, *Stop}


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (Event.RESET_ALONE, Event.RESET),
        (Event.PARTLY_AWAKE, Event.AWAKE),
        (Event.RANKS_DIFFER, Event.STORED_APART),
    ],
)
def test_a_stop_lasts_until_its_own_event_ends_it(begins: Event, ends: Event) -> None:
    others = set(Event) - {ends, Event.FAILED, Event.RESET_ALONE, Event.PARTLY_AWAKE, Event.RANKS_DIFFER}
    assert not after(begins, begins).is_on
    assert not after(begins, *others).is_on
    assert after(begins, begins, ends).is_on


def test_stops_hold_side_by_side() -> None:
    serving = after(Event.RESET_ALONE, Event.PARTLY_AWAKE)
    assert (serving.is_mixed, serving.is_asleep) == (True, True)
    serving.note(Event.AWAKE)
    assert (serving.is_mixed, serving.is_asleep, serving.is_on) == (True, False, False)
    serving.note(Event.RESET)
    assert serving.is_on


def test_a_failure_is_for_good() -> None:
    for first, second in product(Event, repeat=2):
        assert not after(Event.FAILED, first, second).is_on


def test_ranks_that_differ_part_unless_something_has_failed() -> None:
    serving = after(Event.RANKS_DIFFER)
    assert (serving.is_parting, serving.will_part) == (True, True)
    serving.note(Event.FAILED)
    assert (serving.is_parting, serving.will_part) == (True, False)
    assert not after(Event.RANKS_DIFFER, Event.STORED_APART).is_parting


def test_an_ending_engine_saves_for_a_while_however_often_it_is_told_to_stop() -> None:
    now_s = 100.0
    overtime = Overtime(lambda: now_s)
    assert not overtime.is_ending
    overtime.begin_ending()
    now_s += ENDING_S * 0.75
    overtime.begin_ending()
    assert overtime.is_ending
    now_s += ENDING_S * 0.25
    assert not overtime.is_ending


def test_ranks_have_a_while_to_join_another_session() -> None:
    now_s = 100.0
    overtime = Overtime(lambda: now_s)
    assert not overtime.is_joining
    overtime.begin_joining()
    assert overtime.is_joining
    now_s += JOIN_WAIT_S
    assert not overtime.is_joining


def test_the_wait_for_slots_counts_from_the_first_idle_step() -> None:
    now_s = 100.0
    overtime = Overtime(lambda: now_s)
    now_s += LEFT_WAIT_S
    assert not overtime.has_waited
    overtime.begin_idling()
    now_s += LEFT_WAIT_S / 2
    assert not overtime.has_waited
    now_s += LEFT_WAIT_S / 2
    assert overtime.has_waited
    overtime.idle_since_s = None
    assert not overtime.has_waited
