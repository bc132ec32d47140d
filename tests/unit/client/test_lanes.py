"""Which channel a message takes, and what of it may be lost. The link above it has tests of the same."""

from __future__ import annotations

from random import Random

import pytest

from kvoffload.client.lanes import (
    LOOK_NS,
    MARK_AFTER,
    MAX_MESSAGES,
    MAX_PENDING,
    SILENT_NS,
    Backoff,
    Breaker,
    Lane,
    Lanes,
    OneWayLog,
    Pending,
    PendingCalls,
    make_ended,
)
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Adopt,
    Bye,
    ClientMessage,
    Credits,
    Done,
    Drain,
    Hello,
    Invalidate,
    Mark,
    Prefetch,
    Publish,
    Release,
    Stats,
    Subscribe,
)
from kvoffload.protocol.message import OneWay
from tests.kit.client.fake_wire import FakeWire
from tests.kit.server.harness import register_of

SESSION = 7
NOW_NS, WAIT_NS = 1_000, 100
FIRST_NS = 10
INVALIDATE = Invalidate(name_space=4, group=0, hashes=bytes(32))
BLOCKS: list[ClientMessage] = [
    Acquire(name_space=4, chain=bytes(32)),
    AcquireEntries(name_space=4, group=0, hashes=bytes(32)),
    Credits(name_space=4, group=0, count=1),
    Publish(name_space=4, group=0, shard=0, tickets=bytes(8), hashes=bytes(32), parents=bytes(32)),
    Abort(tickets=bytes(8)),
    Release(leases=bytes(8)),
    INVALIDATE,
]
OTHERS: list[ClientMessage] = [
    Hello(protocol_min=1, protocol_max=1),
    register_of(),
    Adopt(former_boot_id=1, index_bytes=1, segment_sizes=bytes(8)),
    Stats(),
    Mark(),
    Subscribe(),
    Drain(),
    Bye(),
    Prefetch(name_space=4, chain=bytes(32)),
]


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
def lanes(wire: FakeWire) -> Lanes:
    return Lanes(wire, lambda: Backoff(FIRST_NS, FIRST_NS, Random(1)), has_blocks=True)


@pytest.fixture
def express(lanes: Lanes) -> Lane:
    return lanes.express


def lease(number: int) -> Release:
    return Release(leases=number.to_bytes(8, "little"))


def look(lanes: Lanes, from_ns: int, until_ns: int | None = None) -> None:
    """Looks for answers as often as a process does that is not held up."""
    for now_ns in (*range(from_ns, until_ns or from_ns, LOOK_NS), until_ns or from_ns):
        for lane in lanes:
            lane.expire(now_ns)


def tell(lane: Lane, message: OneWay) -> bool:
    """Sends a one-way message as the link does."""
    lane.log.add(message, lane.pending.last_number)
    return lane.tell(message, SESSION)


@pytest.mark.parametrize("message", [*BLOCKS, *OTHERS], ids=lambda message: type(message).__name__)
def test_blocks_go_by_the_express_channel(lanes: Lanes, message: ClientMessage) -> None:
    assert lanes.choose(message) is (lanes.express if message in BLOCKS else lanes.control)


def test_who_has_no_blocks_is_served_by_the_other(lanes: Lanes, wire: FakeWire) -> None:
    observers = Lanes(wire, lambda: Backoff(FIRST_NS, FIRST_NS, Random(1)), has_blocks=False)
    assert (lanes.main, observers.main) == (lanes.express, observers.control)


def test_each_lane_counts_for_itself(lanes: Lanes, wire: FakeWire, express: Lane) -> None:
    lanes.control.ask(Stats(), SESSION, NOW_NS, WAIT_NS)
    for number in (1, 2):
        tell(express, lease(number))
    tell(lanes.control, Prefetch(name_space=4, chain=b""))
    pending = express.ask(Acquire(name_space=4, chain=b""), SESSION, NOW_NS, WAIT_NS)
    assert [(type(call.message), call.number) for call in wire.control] == [(Stats, 1), (Prefetch, 1)]
    assert [(type(call.message), call.number) for call in wire.express] == [(Release, 1), (Release, 2), (Acquire, 1)]
    assert {call.session for call in (*wire.control, *wire.express)} == {SESSION}
    assert [call.expires_ns for call in wire.express] == [0, 0, NOW_NS + WAIT_NS + SILENT_NS]
    assert (lanes.control.one_way, express.one_way) == (1, 2)
    assert lanes.control.hear(1) is not pending
    assert (len(lanes.control.log), len(express.log)) == (1, 2)  # an answer says nothing of the other lane
    assert express.hear(1) is pending
    assert (len(lanes.control.log), len(express.log)) == (1, 0)


def test_a_mark_is_wanted_once(express: Lane, wire: FakeWire) -> None:
    for number in range(MARK_AFTER - 1):
        tell(express, lease(number))
    assert not express.needs_mark
    tell(express, lease(0))
    assert express.needs_mark
    mark = express.mark(SESSION, NOW_NS, WAIT_NS)
    assert (wire.express[-1].message, wire.control) == (Mark(), [])
    assert not express.needs_mark
    express.expire(NOW_NS + WAIT_NS)
    assert mark.is_over
    assert express.needs_mark
    express.mark(SESSION, NOW_NS, WAIT_NS)
    express.hear(2)
    assert (len(express.log), express.needs_mark) == (0, False)


def test_a_late_answer_makes_its_own_lane_doubt(lanes: Lanes, express: Lane) -> None:
    look(lanes, NOW_NS)
    pending = express.ask(Credits(name_space=4, group=0, count=1), SESSION, NOW_NS, WAIT_NS)
    assert lanes.next_deadline_ns == NOW_NS + WAIT_NS
    lanes.control.ask(Stats(), SESSION, NOW_NS, 2 * SILENT_NS)
    assert lanes.next_deadline_ns == NOW_NS + WAIT_NS
    look(lanes, NOW_NS, NOW_NS + WAIT_NS)
    assert (pending.is_over, pending.answer) == (True, None)
    assert (lanes.control.breaker.opens_ns, express.breaker.opens_ns) == (None, NOW_NS + SILENT_NS)
    assert lanes.next_deadline_ns == NOW_NS + SILENT_NS
    look(lanes, NOW_NS + WAIT_NS, NOW_NS + SILENT_NS)
    assert (lanes.control.breaker.is_open, express.breaker.is_open) == (False, True)


def test_what_cannot_be_sent_is_over_at_once(express: Lane, wire: FakeWire) -> None:
    wire.takes = False
    pending = express.ask(Credits(name_space=4, group=0, count=1), SESSION, NOW_NS, WAIT_NS)
    assert (pending.is_over, len(express.pending), express.breaker.is_open) == (True, 0, True)
    assert not tell(express, lease(1))


def test_what_cannot_be_encoded_is_not_waited_for() -> None:
    def send(_: object) -> bool:
        raise ValueError("too large")

    lane = Lane(send, Backoff(FIRST_NS, FIRST_NS, Random(1)))
    with pytest.raises(ValueError, match="too large"):
        lane.ask(Stats(), SESSION, NOW_NS, WAIT_NS)
    assert len(lane.pending) == 0


def test_requests_are_bounded_by_lane(lanes: Lanes, express: Lane, wire: FakeWire) -> None:
    for _ in range(MAX_PENDING):
        assert not express.ask(Mark(), SESSION, NOW_NS, WAIT_NS).is_over
    assert express.ask(Mark(), SESSION, NOW_NS, WAIT_NS).is_over
    assert (len(wire.express), express.breaker.is_open) == (MAX_PENDING, False)
    assert not lanes.control.ask(Stats(), SESSION, NOW_NS, WAIT_NS).is_over


def test_a_lost_connection_ends_both(lanes: Lanes, express: Lane, wire: FakeWire) -> None:
    asked = [lane.ask(Mark(), SESSION, NOW_NS, WAIT_NS) for lane in lanes]
    for lane in lanes:
        tell(lane, lease(1))
        lane.breaker.on_unsent(NOW_NS)
    lanes.reset()
    assert [(one.is_over, one.answer) for one in asked] == [(True, None)] * 2
    assert lanes.next_deadline_ns is None
    wire.control, wire.express = [], []
    for lane in lanes:
        assert not lane.breaker.is_open
        lane.ask(Mark(), SESSION, NOW_NS, WAIT_NS)
        lane.tell(lease(2), SESSION)
    assert [call.number for call in (*wire.control, *wire.express)] == [1, 1, 1, 1]


def test_a_mark_of_a_lost_connection_is_awaited_no_more(lanes: Lanes, express: Lane) -> None:
    for number in range(MARK_AFTER):
        tell(lanes.control, lease(number))
    lanes.control.mark(SESSION, NOW_NS, WAIT_NS)
    lanes.reset()
    assert lanes.control.needs_mark


def test_what_is_told_while_requests_end_comes_last(lanes: Lanes, express: Lane) -> None:
    """A caller whose request ended may give something back at once."""
    tell(express, lease(1))

    def give_back() -> None:
        lane = lanes.choose(lease(2))
        lane.log.add(lease(2), lane.pending.last_number)

    for lane in lanes:
        lane.ask(Mark(), SESSION, NOW_NS, WAIT_NS).when_over(give_back)
    lanes.reset()
    assert lanes.take_all() == [lease(1), lease(2), lease(2)]
    assert lanes.take_all() == []


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
    # The listener may ask again at once.
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


def test_it_doubles_up_to_its_bound_and_is_spread() -> None:
    backoff = Backoff(100, 1000, Random(1))
    waits = [backoff.next_ns() for _ in range(8)]
    for wait, middle in zip(waits, [100, 200, 400, 800, 1000, 1000, 1000, 1000], strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle
    assert len(set(waits[4:])) > 1
    backoff.reset()
    assert backoff.next_ns() <= 125


def test_it_opens_when_nothing_is_answered_and_closes_with_any_answer() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    assert not breaker.take_probe(10_000)
    breaker.on_late(1000, 2000)
    breaker.on_late(1500, 2500)
    assert (breaker.is_open, breaker.opens_ns) == (False, 1000 + SILENT_NS)
    breaker.on_answer(3000)
    assert (breaker.is_open, breaker.opens_ns) == (False, None)
    breaker.on_late(2000, 4000)
    assert breaker.opens_ns == 3000 + SILENT_NS  # it has answered after this one was sent
    breaker.on_time(3000 + SILENT_NS)
    assert (breaker.is_open, breaker.opened_ns, breaker.opens_ns) == (True, 3000 + SILENT_NS, None)
    breaker.on_answer(4000 + SILENT_NS)
    assert not breaker.is_open


def test_it_opens_at_once_when_a_request_has_waited_for_so_long() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    breaker.on_late(1000, 1000 + SILENT_NS)
    assert breaker.is_open


def test_a_time_in_which_nobody_looked_is_no_silence(lanes: Lanes, express: Lane) -> None:
    look(lanes, NOW_NS)
    express.ask(Mark(), SESSION, NOW_NS, WAIT_NS)
    look(lanes, NOW_NS, NOW_NS + WAIT_NS)
    look(lanes, NOW_NS + WAIT_NS + 10**9)
    assert (express.breaker.is_open, express.breaker.opens_ns) == (False, NOW_NS + SILENT_NS + 10**9 - LOOK_NS)


def test_it_opens_at_once_when_nothing_is_taken() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    breaker.on_unsent(1000)
    breaker.on_unsent(2000)
    assert (breaker.is_open, breaker.opened_ns) == (True, 1000)


def test_probes_are_far_between() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    breaker.on_late(0, 0)
    assert breaker.take_probe(0)
    assert not breaker.take_probe(70)
    probes = [now for now in range(0, 10_000, 5) if breaker.take_probe(now)]
    assert 75 <= len(probes) <= 135


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
