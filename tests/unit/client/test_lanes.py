"""Which channel a message takes, and what of it may be lost. The link above it has tests of the same."""

from __future__ import annotations

from random import Random

import pytest

from kvoffload.client.backoff import Backoff
from kvoffload.client.lanes import Lane, Lanes
from kvoffload.client.one_way_log import MARK_AFTER
from kvoffload.client.pending import MAX_PENDING
from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Adopt,
    Bye,
    ClientMessage,
    Credits,
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


def tell(lane: Lane, message: OneWay) -> bool:
    """As the link does."""
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
    assert [call.expires_ns for call in wire.express] == [0, 0, NOW_NS + WAIT_NS]
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


def test_a_late_answer_opens_its_own_breaker(lanes: Lanes, express: Lane) -> None:
    pending = express.ask(Credits(name_space=4, group=0, count=1), SESSION, NOW_NS, WAIT_NS)
    assert lanes.next_deadline_ns == NOW_NS + WAIT_NS
    lanes.control.ask(Stats(), SESSION, NOW_NS, 2 * WAIT_NS)
    assert lanes.next_deadline_ns == NOW_NS + WAIT_NS
    for lane in lanes:
        lane.expire(NOW_NS + WAIT_NS)
    assert (pending.is_over, pending.answer) == (True, None)
    assert (lanes.control.breaker.is_open, express.breaker.is_open) == (False, True)
    assert lanes.next_deadline_ns == NOW_NS + 2 * WAIT_NS


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
        lane.breaker.on_late(NOW_NS)
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
    """Whoever waited may give something back at once."""
    tell(express, lease(1))

    def give_back() -> None:
        lane = lanes.choose(lease(2))
        lane.log.add(lease(2), lane.pending.last_number)

    for lane in lanes:
        lane.ask(Mark(), SESSION, NOW_NS, WAIT_NS).when_over(give_back)
    lanes.reset()
    assert lanes.take_all() == [lease(1), lease(2), lease(2)]
    assert lanes.take_all() == []
