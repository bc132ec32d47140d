"""Long calls outside of the loop: turns, parts, faults."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from kvoffload.protocol import Done, Stats
from kvoffload.server.common.steps import Find, Steps, take_parts
from kvoffload.server.long_calls import LongCalls
from kvoffload.server.sessions.outbox import Later


@pytest.fixture
def calls() -> Iterator[LongCalls]:
    calls = LongCalls()
    yield calls
    calls.close()


def later(connection: bytes, find: Find) -> Later:
    return Later(connection, Stats(), 1, find)


def await_done(calls: LongCalls) -> list[Later]:
    poller = select.poll()
    poller.register(calls.fileno(), select.POLLIN)
    assert poller.poll(60_000)
    done = []
    for one, found in calls.take_done():
        assert found.done()
        done.append(one)
    return done


def test_a_connection_is_busy_until_its_call_is_done(calls: LongCalls) -> None:
    gate = Event()

    def find() -> Done:
        gate.wait()
        return Done()

    calls.start(later(b"a", find))
    try:
        assert (len(calls), calls.is_busy(b"a"), calls.is_busy(b"b")) == (1, True, False)
        assert list(calls.take_done()) == []
    finally:
        gate.set()
    (one,) = await_done(calls)
    assert one.connection == b"a"
    assert (len(calls), calls.is_busy(b"a")) == (0, False)


def test_after_each_part_of_a_call_other_users_have_their_turn(calls: LongCalls) -> None:
    """However many parts one call has, another user waits for one of them at most."""
    gate, order = Event(), list[bytes]()

    def work(name: bytes, parts: int) -> Steps[Done]:
        for _ in range(parts):
            assert gate.wait(60)
            order.append(name)
            yield
        return Done()

    calls.start(later(b"his", take_parts(work(b"his", 3))), owner=1)
    calls.start(later(b"hers", take_parts(work(b"hers", 1))), owner=2)
    gate.set()
    done = list[bytes]()
    while len(calls):
        done += [one.connection for one in await_done(calls)]
    assert order == [b"his", b"hers", b"his", b"his"]
    assert done == [b"hers", b"his"]


def test_a_fault_in_a_later_part_is_handed_over(calls: LongCalls) -> None:
    def work() -> Steps[Done]:
        yield
        raise OSError("broken")

    calls.start(later(b"a", take_parts(work())))
    found = list[Any]()
    while len(calls):
        poller = select.poll()
        poller.register(calls.fileno(), select.POLLIN)
        assert poller.poll(60_000)
        found += [one for _, one in calls.take_done()]
    (failed,) = found
    with pytest.raises(OSError, match="broken"):
        failed.result()


def test_users_have_their_turns(calls: LongCalls) -> None:
    """However many calls one has, another waits for one of them at most."""
    gate, order = Event(), list[bytes]()

    def call(name: bytes, *, waits: bool = False) -> Later:
        def find() -> Done:
            assert not waits or gate.wait(60)
            order.append(name)
            return Done()

        return later(name, find)

    calls.start(call(b"his first", waits=True), owner=1)
    for number in range(3):
        calls.start(call(b"his %d" % number), owner=1)
    calls.start(call(b"hers"), owner=2)
    calls.start(call(b"hers too"), owner=2)
    gate.set()
    while len(calls):
        await_done(calls)
    assert order == [b"his first", b"his 0", b"hers", b"his 1", b"hers too", b"his 2"]


def test_the_end_waits_for_all_that_was_started() -> None:
    calls = LongCalls()
    found = list[int]()
    for number in range(5):

        def find(number: int = number) -> Done:
            found.append(number)
            return Done()

        calls.start(later(b"%d" % number, find), owner=number % 2)
    calls.close()
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a_fault_is_handed_over(calls: LongCalls) -> None:
    def fail() -> Done:
        raise OSError("broken")

    calls.start(later(b"a", fail))
    poller = select.poll()
    poller.register(calls.fileno(), select.POLLIN)
    assert poller.poll(60_000)
    ((_, found),) = calls.take_done()
    with pytest.raises(OSError, match="broken"):
        found.result()


def test_its_end_closes_one_descriptor_once() -> None:
    calls = LongCalls()
    file = calls.fileno()
    calls.close()
    again = os.open(os.devnull, os.O_RDONLY)
    assert again <= file
    calls.close()
    os.fstat(again)
    os.close(again)
