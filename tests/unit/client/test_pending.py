"""Requests on their way."""

from __future__ import annotations

from kvoffload.client.pending import Pending, PendingCalls, make_ended
from kvoffload.protocol import Done, Stats


def make(deadline_ns: int) -> Pending:
    return Pending(message=Stats(), deadline_ns=deadline_ns, sent_ns=0)


def test_a_request_is_over_once() -> None:
    heard: list[int] = []
    pending = make(5)
    pending.when_over(lambda: heard.append(1))
    assert heard == []
    pending.end(Done())
    pending.end(None)
    assert (heard, pending.answer) == ([1], Done())
    pending.when_over(lambda: heard.append(2))
    assert heard == [1, 2]


def test_requests_are_numbered_and_answered_by_number() -> None:
    calls = PendingCalls()
    assert calls.draw_number() == 1
    first, second = make(5), make(3)
    assert (calls.add(first), calls.add(second), calls.last_number, len(calls)) == (2, 3, 3, 2)
    assert calls.take(3) is second
    assert calls.take(3) is None
    assert calls.next_deadline_ns() == 5


def test_what_is_late_is_over_without_an_answer() -> None:
    calls = PendingCalls()
    early, late = make(10), make(20)
    calls.add(early)
    calls.add(late)
    assert calls.expire(10) == [early]
    assert (early.is_over, early.answer, late.is_over) == (True, None, False)
    assert calls.take(1) is None


def test_a_lost_connection_ends_all_and_numbers_begin_anew() -> None:
    calls = PendingCalls()
    waiting = [make(10), make(20)]
    for pending in waiting:
        calls.add(pending)
    # Whoever hears of it may ask again at once.
    waiting[0].when_over(lambda: calls.add(make(30)) and None)
    calls.end_all()
    assert all(pending.is_over for pending in waiting)
    assert (len(calls), calls.last_number, calls.next_deadline_ns()) == (1, 1, 30)


def test_what_is_forgotten_is_still_awaited() -> None:
    calls = PendingCalls()
    pending = make(10)
    calls.add(pending)
    calls.forget()
    assert (pending.is_wanted, pending.is_over, len(calls)) == (False, False, 1)


def test_what_is_not_asked_is_over() -> None:
    ended = make_ended(Stats(), 7)
    assert (ended.is_over, ended.answer, ended.deadline_ns) == (True, None, 7)
