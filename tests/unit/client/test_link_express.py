"""A link's express channel: when it is there, what is awaited of it, and what becomes of it all when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvoffload.client.lanes import LOOK_NS, SILENT_NS
from kvoffload.client.link import Link
from kvoffload.client.settings import SECOND_NS, LinkState
from kvoffload.protocol import (
    Abort,
    Acquire,
    Acquired,
    Call,
    Credits,
    CreditsGranted,
    Done,
    Error,
    ErrorCode,
    Express,
    Invalidate,
    Mark,
    Prefetch,
    Publish,
    Release,
    Stats,
)
from kvoffload.protocol.message import Message, OneWay
from kvoffload.types import AcquireOutcome
from tests.kit.client.fake_wire import NO_FILE, FakeWire, Script, lease

ACQUIRE = Acquire(name_space=4, chain=bytes(32))
INVALIDATE = Invalidate(name_space=4, group=0, hashes=bytes(32))
PREFETCH = Prefetch(name_space=4, chain=bytes(32))
PUBLISH = Publish(name_space=4, group=0, shard=0, tickets=bytes(8), hashes=bytes(32), parents=bytes(32))
WAIT_NS = SECOND_NS // 10


@pytest.fixture
def open_files() -> Iterator[list[int]]:
    """Two, which must be closed when the test is over."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    yield files
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def messages(calls: list[Call]) -> list[Message]:
    return [call.message for call in calls]


def test_blocks_go_by_express(link: Link, wire: FakeWire, script: Script) -> None:
    script.join(session=9)
    assert (wire.express_end, wire.take(), wire.take_express()) == (NO_FILE, [], [])
    acquire = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    link.tell(lease(2), script.now_ns)
    link.tell(PREFETCH, script.now_ns)
    stats = link.ask(Stats(), script.now_ns, WAIT_NS)
    sent = wire.take_express()
    assert [(call.number, call.session, call.message) for call in sent] == [(1, 9, ACQUIRE), (1, 9, lease(2))]
    assert messages(wire.take()) == [PREFETCH, Stats()]
    hit = Acquired(outcome=AcquireOutcome.HIT, boundary=16, lease=7)
    script.answer_express(sent[0], hit)
    assert (acquire.answer, stats.is_over) == (hit, False)


@pytest.mark.parametrize("message", [None, lease(1), INVALIDATE])
def test_it_may_come_before_all_else(link: Link, wire: FakeWire, script: Script, message: OneWay | None) -> None:
    """A process whose session is registered gets it with its welcome."""
    script.join()
    link.hang_up(script.now_ns, "gone")
    if message is not None:
        link.tell(message, script.now_ns)
    script.now_ns += SECOND_NS
    again = script.join(is_reopened=True, brings_express=True)
    assert (wire.express_end, link.state) == (NO_FILE, LinkState.SERVING)
    assert messages(again) == [message] * (message is not None)
    link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    assert (wire.take(), messages(wire.take_express())) == ([], [ACQUIRE])


def test_without_an_express_channel_a_link_does_not_serve(link: Link, wire: FakeWire, script: Script) -> None:
    script.join(opens_express=False)
    assert link.state is LinkState.JOINING
    script.pass_time(3)
    assert (link.state, link.fault) == (LinkState.DOWN, "the server does not answer: awaited is its express")


def test_where_there_is_none_to_be_had_it_is_tried_again(link: Link, wire: FakeWire, script: Script) -> None:
    script.join(opens_express=False)
    script.tell(Error(code=ErrorCode.BUSY, message="there are too many"))
    assert (link.state, link.fault) == (LinkState.DOWN, "refused: there are too many")
    script.pass_time(5)
    assert wire.dials == 2


@pytest.mark.parametrize("state", [LinkState.DOWN, LinkState.SERVING, LinkState.CLOSED])
def test_an_express_channel_in_another_state_is_closed(
    link: Link, wire: FakeWire, script: Script, open_files: list[int], state: LinkState
) -> None:
    if state is LinkState.CLOSED:
        link.close()
    elif state is LinkState.SERVING:
        script.join()
        wire.express_end = -1
    os.close(open_files[1])
    script.tell(Express(), open_files[:1])
    assert (link.state, wire.express_end) == (state, -1)


@pytest.mark.parametrize("count", [0, 2])
def test_one_without_its_descriptor_is_none(
    link: Link, wire: FakeWire, script: Script, open_files: list[int], count: int
) -> None:
    link.on_time(script.now_ns)
    for file in open_files[count:]:
        os.close(file)
    script.tell(Express(), open_files[:count])
    assert (link.state, wire.express_end) == (LinkState.DOWN, -1)


def test_a_late_answer_on_express_is_of_blocks_alone(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    (late,) = wire.take_express()
    script.look_for(0.26)
    assert (pending.is_over, pending.answer) == (True, None)
    assert (link.is_serving, link.state) == (False, LinkState.SERVING)
    wire.take_express()
    stats = link.ask(Stats(), script.now_ns, WAIT_NS)
    script.answer(wire.take()[0], Done())
    assert (stats.answer, link.is_serving) == (Done(), False)
    script.look_for(0.5)
    assert wire.take() == []
    assert set(map(type, messages(wire.take_express()))) == {Mark}
    # A lease in a late answer is released on the channel over which it came.
    script.answer_express(late, Acquired(outcome=AcquireOutcome.HIT, boundary=16, lease=77))
    assert link.is_serving
    assert (wire.take(), messages(wire.take_express())) == ([], [lease(77)])


def test_slots_that_came_by_express_and_nobody_waits_for_go_back_by_it(
    link: Link, wire: FakeWire, script: Script
) -> None:
    script.join()
    link.ask(Credits(name_space=4, group=0, count=1), script.now_ns, WAIT_NS).is_wanted = False
    (call,) = wire.take_express()
    script.answer_express(call, CreditsGranted(tickets=bytes(8), addresses=bytes(8)))
    assert messages(wire.take_express()) == [Abort(tickets=bytes(8))]


def test_a_dead_control_channel_is_not_hidden_by_express(link: Link, wire: FakeWire, script: Script) -> None:
    """Blocks are still served, but the client would get no other message any more."""
    script.join()
    link.ask(Stats(), script.now_ns, WAIT_NS)
    wire.take()
    script.look_for(0.3)
    for _ in range(29):
        script.pass_time(1)
        link.ask(ACQUIRE, script.now_ns, WAIT_NS)
        (call,) = wire.take_express()
        script.answer_express(call, Acquired(outcome=AcquireOutcome.MISS, boundary=0))
        assert link.is_serving
    assert set(map(type, messages(wire.take()))) == {Mark}
    script.pass_time(2)
    assert (link.state, link.fault) == (LinkState.DOWN, "the server has not answered for long")


def test_a_dead_express_channel_is_not_hidden_by_control(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    script.look_for(0.3)
    for _ in range(29):
        script.pass_time(1)
        link.ask(Stats(), script.now_ns, WAIT_NS)
        script.answer(wire.take()[-1], Done())
    assert link.state is LinkState.SERVING
    script.pass_time(2)
    assert link.state is LinkState.DOWN


def test_what_either_lost_is_said_again_where_it_was(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    link.tell(PREFETCH, script.now_ns)
    link.tell(lease(2), script.now_ns)
    acquire = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    link.tell(PUBLISH, script.now_ns)
    wire.take()
    sent = wire.take_express()
    script.answer_express(sent[1], Acquired(outcome=AcquireOutcome.MISS, boundary=0))  # the second release arrived
    assert acquire.is_over
    ask = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    link.hang_up(script.now_ns, "gone")
    assert (ask.is_over, ask.answer) == (True, None)
    link.tell(INVALIDATE, script.now_ns)
    script.now_ns += SECOND_NS
    again = script.join(is_reopened=True)
    # In the order in which it was told: the publish must not bring back what was invalidated.
    assert [(call.number, call.message) for call in again] == [(1, PREFETCH), (1, PUBLISH), (2, INVALIDATE)]
    link.tell(lease(3), script.now_ns)
    assert (wire.take(), messages(wire.take_express())) == ([], [lease(3)])


def test_what_was_answered_by_express_is_not_said_again(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    for number in range(256):
        link.tell(lease(number), script.now_ns)
    sent = wire.take_express()
    assert (sent[-1].message, wire.take()) == (Mark(), [])
    script.answer_express(sent[-1], Done())
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    assert script.join(is_reopened=True) == []


def test_an_express_channel_that_takes_nothing_ends_the_connection(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    wire.takes = False
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    assert (pending.is_over, link.is_serving, link.state) == (True, False, LinkState.SERVING)
    link.tell(lease(1), script.now_ns)
    assert link.state is LinkState.DOWN


def test_confirmed_is_what_the_channel_of_blocks_has_answered(link: Link, wire: FakeWire, script: Script) -> None:
    assert link.confirm(script.now_ns, WAIT_NS) is None
    script.join()
    assert link.confirm(script.now_ns, WAIT_NS) is None
    link.tell(lease(1), script.now_ns)
    confirmed = link.confirm(script.now_ns, WAIT_NS)
    assert confirmed is not None
    release, mark = wire.take_express()
    assert (release.message, mark.message, mark.expires_ns) == (lease(1), Mark(), script.now_ns + WAIT_NS + SILENT_NS)
    assert not confirmed.is_over
    script.answer_express(mark, Done())
    assert confirmed.is_over
    assert link.confirm(script.now_ns, WAIT_NS) is None
    link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    late = link.confirm(script.now_ns, WAIT_NS)
    assert late is not None
    script.look_for(0.2)
    assert late.is_over


def test_answers_of_another_server_are_none(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    script.boot_id = 2
    script.answer_express(wire.take_express()[0], Acquired(outcome=AcquireOutcome.HIT, boundary=16, lease=7))
    assert (pending.answer, link.state) == (None, LinkState.DOWN)
    assert link.fault == "another server answers"


@pytest.mark.parametrize("code", [ErrorCode.NO_SESSION, ErrorCode.OUT_OF_ORDER])
def test_a_server_that_has_lost_the_thread_is_greeted_anew(
    link: Link, wire: FakeWire, script: Script, code: ErrorCode
) -> None:
    script.join()
    link.tell(lease(1), script.now_ns)
    script.answer_express(wire.take_express()[0], Error(code=code, message="who?", about_op=Release.op))
    assert (link.state, link.fault) == (LinkState.DOWN, "who?")


def test_a_refused_one_way_message_ends_nothing(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    (call,) = wire.take_express()
    script.answer_express(call, Error(code=ErrorCode.NOT_FOUND, message="no group", about_op=Publish.op))
    assert (pending.is_over, link.state) == (False, LinkState.SERVING)


def test_what_is_awaited_is_known_by_channel(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    assert (link.lanes.awaits_answers, link.lanes.awaits_control) == (False, False)
    link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    assert (link.lanes.awaits_answers, link.lanes.awaits_control) == (True, False)
    assert link.next_ns(script.now_ns) == script.now_ns + LOOK_NS
    link.ask(Stats(), script.now_ns, LOOK_NS // 2)
    assert (link.lanes.awaits_answers, link.lanes.awaits_control) == (True, True)
    assert link.next_ns(script.now_ns) == script.now_ns + LOOK_NS // 2
    link.tell(PREFETCH, script.now_ns)
    for number in (1, 2):
        link.tell(lease(number), script.now_ns)
    assert link.lanes.control.one_way == 1  # of the control channel, which `bye` speaks of
