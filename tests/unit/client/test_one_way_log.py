"""What is said again after a lost connection."""

from __future__ import annotations

from kvoffload.client.one_way_log import MARK_AFTER, MAX_MESSAGES, OneWayLog
from kvoffload.protocol import Release


def lease(number: int) -> Release:
    return Release(leases=number.to_bytes(8, "little"))


def test_an_answer_confirms_what_was_sent_before_its_request() -> None:
    log = OneWayLog()
    log.add(lease(1), 3)  # after request 3
    log.add(lease(2), 3)
    log.confirm(3)  # was asked before them
    assert len(log) == 2
    log.add(lease(3), 4)
    log.confirm(4)
    assert log.take_all() == [lease(3)]
    assert len(log) == 0


def test_at_its_bound_the_oldest_is_forgotten() -> None:
    log = OneWayLog()
    for number in range(MAX_MESSAGES + 2):
        assert log.needs_mark == (number >= MARK_AFTER)
        log.add(lease(number), 1)
    assert len(log) == MAX_MESSAGES
    assert log.take_all()[0] == lease(2)
