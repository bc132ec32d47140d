"""Long calls beside the loop: order within a connection, bounds, faults."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from threading import Event

import pytest

from kvoffload.protocol import Done, ServerMessage, Stats
from kvoffload.server import long_calls
from kvoffload.server.long_calls import LongCalls
from kvoffload.server.outbox import Later


@pytest.fixture
def calls() -> Iterator[LongCalls]:
    calls = LongCalls()
    yield calls
    calls.close()


def later(connection: bytes, find: Callable[[], ServerMessage]) -> Later:
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


def test_what_comes_behind_waits_until_it_is_done(calls: LongCalls) -> None:
    gate = Event()

    def find() -> Done:
        gate.wait()
        return Done()

    calls.start(later(b"a", find))
    try:
        assert (len(calls), calls.is_busy(b"a"), calls.is_busy(b"b")) == (1, True, False)
        assert calls.wait(b"a", b"1")
        assert calls.wait(b"a", b"2")
        assert calls.take_waiting(b"a") is None
        assert list(calls.take_done()) == []
    finally:
        gate.set()
    (one,) = await_done(calls)
    assert one.connection == b"a"
    assert not calls.is_busy(b"a")
    assert calls.take_waiting(b"a") == b"1"
    calls.start(later(b"a", Done))
    assert calls.take_waiting(b"a") is None
    await_done(calls)
    assert [calls.take_waiting(b"a") for _ in range(2)] == [b"2", None]
    assert calls.waiting == 0


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


def test_what_waits_is_bounded(calls: LongCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_calls, "MAX_WAITING", 2)
    monkeypatch.setattr(long_calls, "MAX_WAITING_BYTES", 10)
    assert [calls.wait(b"a", frame) for frame in (b"1", b"2", b"3")] == [True, True, False]
    assert [calls.wait(b"b", frame) for frame in (bytes(9), bytes(2), bytes(1))] == [True, False, True]


def test_its_end_closes_one_descriptor_once() -> None:
    calls = LongCalls()
    file = calls.fileno()
    calls.close()
    again = os.open(os.devnull, os.O_RDONLY)
    assert again <= file
    calls.close()
    os.fstat(again)
    os.close(again)
