"""A link: joins, notices what is lost, and says again what may have been."""

from __future__ import annotations

import pytest

from kvoffload.client.lanes import SILENT_NS
from kvoffload.client.link import MOST_LINES, Link, ServerWarnings
from kvoffload.client.settings import SECOND_NS, LinkState
from kvoffload.protocol import (
    Abort,
    Acquire,
    Acquired,
    AdoptVerdict,
    Call,
    Closing,
    ClosingReason,
    Counts,
    CreditsGranted,
    Done,
    Error,
    ErrorCode,
    HelloAccepted,
    Holding,
    Mark,
    Offer,
    Quarantine,
    Release,
    Retire,
    Role,
    Stats,
    Warned,
    Welcome,
)
from kvoffload.types import AcquireOutcome
from tests.kit.client.fake_wire import NO_FILE, FakeWire, Script, lease, make_link

COUNTS = Counts(**{name: 0 for name in Counts.__dataclass_fields__ if name != "tenants"})
WAIT_NS = SECOND_NS // 10
ACQUIRE = Acquire(name_space=4, chain=b"")
MISS = Acquired(outcome=AcquireOutcome.MISS, boundary=0)


def one_ways(calls: list[Call]) -> list[tuple[int, object]]:
    return [(call.number, call.message) for call in calls if isinstance(call.message, Release | Abort)]


def test_it_joins(link: Link, wire: FakeWire, script: Script) -> None:
    assert link.state is LinkState.DOWN
    script.join(session=9)
    assert link.state is LinkState.SERVING
    assert (link.is_serving, link.fault, link.joins, link.boot_id) == (True, "", 1, 1)
    assert wire.endpoint == "ipc://c"
    ((greeting, pidfds),) = wire.lifeline
    assert (greeting.number, pidfds) == (1, (3,))
    assert link.registered is not None
    assert link.registered.name_space == 4
    assert link.memories.current is not None
    assert link.memories.current.memory_id == NO_FILE


def test_requests_are_numbered_on_from_the_opening(link: Link, wire: FakeWire, script: Script) -> None:
    script.join(session=9)
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    (call,) = wire.take()
    assert (call.number, call.session, call.expires_ns) == (3, 9, script.now_ns + WAIT_NS + SILENT_NS)
    script.answer(call, COUNTS)
    assert (pending.is_over, pending.answer) == (True, COUNTS)


def test_nobody_is_asked_without_a_server(link: Link, wire: FakeWire, script: Script) -> None:
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    assert (pending.is_over, pending.answer) == (True, None)
    wire.listens = False
    link.on_time(script.now_ns)
    assert link.fault == "there is no socket"
    link.on_time(script.now_ns)
    assert wire.dials == 1  # not before the back-off is over
    script.pass_time(5)
    assert wire.dials == 2
    assert wire.control == []


def test_the_back_off_grows_and_ends_with_a_join(link: Link, wire: FakeWire, script: Script) -> None:
    wire.listens = False
    waits = []
    for _ in range(12):
        link.on_time(script.now_ns)
        waits.append(link.next_ns(script.now_ns) - script.now_ns)
        script.now_ns += 3 * SECOND_NS
    assert waits[0] < 0.026 * SECOND_NS
    assert waits[-1] == SECOND_NS // 4  # `on_time` is called now and then in any case
    assert wire.dials == 12
    wire.listens = True
    script.join()
    link.hang_up(script.now_ns, "gone")
    assert link.next_ns(script.now_ns) - script.now_ns < 0.026 * SECOND_NS


def test_a_server_that_cannot_be_found_is_looked_for_later(link: Link, wire: FakeWire, script: Script) -> None:
    assert link.is_dial_due(script.now_ns)
    link.cannot_dial(script.now_ns, "no server")
    assert (link.is_dial_due(script.now_ns), link.fault) == (False, "no server")
    script.now_ns += SECOND_NS
    assert link.is_dial_due(script.now_ns)
    script.join()
    assert not link.is_dial_due(script.now_ns)
    link.cannot_dial(script.now_ns, "no server")
    assert (link.state, link.fault) == (LinkState.SERVING, "")


def test_a_server_that_does_not_answer_a_greeting_is_left(link: Link, wire: FakeWire, script: Script) -> None:
    link.on_time(script.now_ns)
    assert link.state is LinkState.JOINING
    script.pass_time(1.9)
    assert link.state is LinkState.JOINING
    script.pass_time(0.2)
    assert link.state is LinkState.DOWN
    assert link.fault == "the server does not answer: awaited is its welcome"
    assert wire.hang_ups == 1


def test_memory_is_waited_for_without_a_deadline(link: Link, script: Script) -> None:
    link.on_time(script.now_ns)
    script.tell(Welcome(protocol=1, session=5, domain="", control="ipc://c"))
    (hello,) = script.wire.take()
    script.answer(hello, HelloAccepted(protocol=1, capabilities=(), domain=""))
    script.pass_time(1000)
    assert link.state is LinkState.JOINING


def test_what_is_refused_is_shown_and_tried_again(link: Link, wire: FakeWire, script: Script) -> None:
    link.on_time(script.now_ns)
    refusal = Error(code=ErrorCode.NOT_ALLOWED, message="user 7 may not use this server")
    script.tell(refusal)
    assert (link.state, link.refusal) == (LinkState.DOWN, refusal)
    assert link.fault == "refused: user 7 may not use this server"
    script.pass_time(5)
    assert wire.dials == 2
    script.join()
    assert (link.refusal, link.fault) == (None, "")


def test_who_sees_a_refusal_sees_its_reason_too(
    link: Link, wire: FakeWire, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Error | None, str]] = []
    monkeypatch.setattr(wire, "hang_up", lambda: seen.append((link.refusal, link.fault)))
    link.on_time(script.now_ns)
    script.tell(Error(code=ErrorCode.NOT_ALLOWED, message="user 7 may not use this server"))
    assert seen == [(None, "refused: user 7 may not use this server")]
    assert link.refusal is not None


def test_what_may_have_been_lost_is_said_again_to_a_session_that_goes_on(
    link: Link, wire: FakeWire, script: Script
) -> None:
    script.join()
    link.tell(lease(1), script.now_ns)
    link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    link.tell(lease(2), script.now_ns)
    calls = wire.take_express()
    assert one_ways(calls) == [(1, lease(1)), (2, lease(2))]
    script.answer_express(calls[1], MISS)  # the first one arrived
    link.hang_up(script.now_ns, "gone")
    link.tell(lease(3), script.now_ns)
    assert wire.take_express() == []
    script.now_ns += SECOND_NS
    assert one_ways(script.join(is_reopened=True)) == [(1, lease(2)), (2, lease(3))]


def test_an_adopted_session_goes_on(link: Link, script: Script) -> None:
    """The welcome cannot know it: the memory was adopted after it."""
    script.join(session=5, resume=(9 << 32) + 5)
    first = link.sessions
    link.tell(lease(1), script.now_ns)
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    script.verdict = AdoptVerdict.WANTED
    again = script.join(boot_id=2, session=(7 << 32) + 5, adopted_boot_id=1)
    assert one_ways(again) == [(1, lease(1))]
    assert (first, link.sessions) == (1, 1)
    greeting = script.wire.lifeline[1][0].message
    assert (greeting.former_session, greeting.former_boot_id) == ((9 << 32) + 5, 1)  # type: ignore[attr-defined]
    offer, descriptors = script.wire.lifeline[2]
    assert isinstance(offer.message, Offer)
    assert descriptors == (NO_FILE + 1, NO_FILE, NO_FILE + 2)


def test_other_memory_hears_nothing_of_the_old_one(link: Link, script: Script) -> None:
    """Its tickets and leases have the same numbers."""
    script.join()
    first = link.sessions
    link.tell(lease(1), script.now_ns)
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    assert one_ways(script.join(boot_id=2, memory=NO_FILE + 10)) == []
    assert (first, link.sessions) == (1, 2)


@pytest.mark.parametrize("boot_id", [1, 2])
def test_another_session_of_the_same_memory_is_not_the_old_one(link: Link, script: Script, boot_id: int) -> None:
    """This holds whatever the welcome says. One-way messages are sent again: they may name slots that the new session
    has given."""
    script.join(session=0x70005)
    first = link.sessions
    link.tell(lease(1), script.now_ns)
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    assert one_ways(script.join(boot_id=boot_id, session=0x70006, adopted_boot_id=9)) == [(1, lease(1))]
    assert (first, link.sessions) == (1, 2)


def test_answers_of_another_server_are_none(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    script.boot_id = 2
    script.answer(wire.take()[0], COUNTS)
    assert (pending.is_over, pending.answer) == (True, None)
    assert (link.state, link.fault) == (LinkState.DOWN, "another server answers")


@pytest.mark.parametrize(
    "code", [ErrorCode.NO_SESSION, ErrorCode.NOT_GREETED, ErrorCode.NOT_REGISTERED, ErrorCode.OUT_OF_ORDER]
)
def test_a_server_that_has_lost_the_thread_is_greeted_anew(link: Link, script: Script, code: ErrorCode) -> None:
    script.join()
    script.send(Error(code=code, message="who?"), 1)
    assert (link.state, link.fault) == (LinkState.DOWN, "who?")


def test_a_quarantine_is_answered_by_a_greeting(link: Link, script: Script) -> None:
    script.join()
    script.tell(Quarantine(code=ErrorCode.OUT_OF_ORDER, message="a gap"))
    assert (link.state, link.fault) == (LinkState.DOWN, "a gap")


def test_a_server_that_ends_serves_to_the_end(link: Link, script: Script) -> None:
    """Leases are released to it still."""
    script.join()
    script.tell(Closing(reason=ClosingReason.DRAINED))
    assert link.state is LinkState.SERVING


def test_whoever_comes_back_to_a_server_that_ends_is_served_to_the_end(link: Link, script: Script) -> None:
    """It may hold something, which the server waits for."""
    link.on_time(script.now_ns)
    script.tell(Closing(reason=ClosingReason.DRAINED))
    assert (link.state, link.is_closing) == (LinkState.JOINING, True)
    script.join()
    assert (link.state, link.is_closing) == (LinkState.SERVING, True)
    link.hang_up(script.now_ns, "it has ended")
    assert not link.is_closing


def test_a_refused_one_way_message_ends_nothing(link: Link, wire: FakeWire, script: Script) -> None:
    """Its number is not that of a request."""
    script.join()
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    number = wire.take()[0].number
    script.send(Error(code=ErrorCode.NOT_FOUND, message="no such group", about_op=32), number)
    assert (pending.is_over, link.state) == (False, LinkState.SERVING)


def test_a_late_server_is_asked_nothing_but_whether_it_answers(wire: FakeWire) -> None:
    """By an observer, on the only channel that it has."""
    link = make_link(wire, role=Role.OBSERVER)
    script = Script(link, wire)
    script.join()
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    late = wire.take()[0]
    script.look_for(0.11)
    assert (pending.is_over, pending.answer) == (True, None)
    assert (link.is_serving, link.is_prompt) == (True, False)
    script.look_for(0.14)
    assert (link.is_serving, link.state) == (False, LinkState.SERVING)
    assert set(map(type, [call.message for call in wire.take()])) == {Mark}
    # The late answer shows that the server lives.
    script.answer(late, COUNTS)
    assert (link.is_serving, link.is_prompt) == (True, True)
    script.look_for(0.2)
    assert wire.take() == []


def test_a_server_that_is_slow_is_asked_on(link: Link, wire: FakeWire, script: Script) -> None:
    """Each answer is later than its deadline, as from a server that a quota stops nine tenths of the time."""
    script.join()
    for _ in range(5):
        pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
        asked, *probes = wire.take_express()
        assert (type(asked.message), probes) == (Acquire, [])
        script.look_for(0.15)
        assert (pending.is_over, pending.answer, link.is_serving) == (True, None, True)
        for call in (asked, *wire.take_express()):
            script.answer_express(call, Done() if call is not asked else MISS)


def test_a_process_that_was_held_up_itself_waits_for_as_long_again(link: Link, wire: FakeWire, script: Script) -> None:
    """Where a quota or the machine stops a process, it has mostly stopped its server, too."""
    script.join()
    script.look_for(0.1)
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    (asked,) = wire.take_express()
    script.pass_time(5)
    assert (pending.is_over, link.is_prompt) == (False, True)
    script.look_for(0.05)
    script.answer_express(asked, MISS)
    assert pending.answer == MISS
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    script.pass_time(5)
    script.look_for(0.11)
    assert (pending.is_over, pending.answer) == (True, None)


def test_slots_that_nobody_waits_for_go_back(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    pending.is_wanted = False
    tickets = (5).to_bytes(8, "little")
    script.answer(wire.take()[0], CreditsGranted(tickets=tickets, addresses=bytes(8)))
    assert [call.message for call in wire.take_express()] == [Abort(tickets=tickets)]
    assert pending.answer is None


def test_what_cannot_be_given_back_ends_the_connection_now_and_not_long_ago(
    link: Link, wire: FakeWire, script: Script
) -> None:
    script.join()
    wire.takes = False
    script.send(Acquired(outcome=AcquireOutcome.HIT, boundary=16, lease=77), 1000)
    assert link.state is LinkState.DOWN
    assert link.next_ns(script.now_ns) > script.now_ns


def test_a_server_that_has_not_answered_for_long_is_greeted_anew(link: Link, script: Script) -> None:
    script.join()
    link.ask(Stats(), script.now_ns, WAIT_NS)
    script.look_for(0.3)
    for _ in range(29):
        script.pass_time(1)
    assert link.state is LinkState.SERVING
    script.pass_time(2)
    assert link.state is LinkState.DOWN


def test_a_server_that_does_not_read_is_left_without_a_hole(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    wire.takes = False
    pending = link.ask(ACQUIRE, script.now_ns, WAIT_NS)
    assert (pending.is_over, link.is_serving, link.state) == (True, False, LinkState.SERVING)
    link.tell(lease(1), script.now_ns)
    assert link.state is LinkState.DOWN
    wire.takes = True
    script.now_ns += SECOND_NS
    assert one_ways(script.join(is_reopened=True)) == [(1, lease(1))]


def test_many_one_way_messages_are_followed_by_a_request(link: Link, wire: FakeWire, script: Script) -> None:
    """Without the request the client would never know that they arrived."""
    script.join()
    for number in range(256):
        link.tell(lease(number), script.now_ns)
    calls = wire.take_express()
    assert isinstance(calls[-1].message, Mark)
    script.answer_express(calls[-1], Done())
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    assert one_ways(script.join(is_reopened=True)) == []


def test_while_that_request_is_awaited_there_is_no_second_one(link: Link, wire: FakeWire, script: Script) -> None:
    def tell(count: int) -> list[Call]:
        for number in range(count):
            link.tell(lease(number), script.now_ns)
        return [call for call in wire.take_express() if isinstance(call.message, Mark)]

    script.join()
    (mark,) = tell(300)
    script.answer_express(mark, Done())
    assert tell(211) == []  # 255 are in doubt
    assert len(tell(2)) == 1
    script.look_for(6)  # it was not answered in time, and others asked whether the server answers
    assert len(tell(1)) > 0
    assert tell(1) == []


def test_the_end_ends_everything(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    pending = link.ask(Stats(), script.now_ns, WAIT_NS)
    link.close()
    assert (pending.is_over, link.state) == (True, LinkState.CLOSED)
    link.tell(lease(1), script.now_ns)
    script.pass_time(10)
    assert wire.dials == 1


FORMER = ("adopt", "events", "former")


def holdings(wire: FakeWire) -> list[list[tuple[int, int]]]:
    told = [call.message for call, _ in wire.lifeline if isinstance(call.message, Holding)]
    return [[(one.memory, one.size_bytes) for one in holding.memories] for holding in told]


def test_a_server_hears_what_is_held_of_former_ones_and_each_change(wire: FakeWire) -> None:
    link = make_link(wire, role=Role.WORKER)
    script = Script(link, wire)
    script.join(capabilities=FORMER)
    assert holdings(wire) == [[]]
    link.hang_up(script.now_ns, "killed")
    script.now_ns += SECOND_NS
    script.join(boot_id=2, memory=NO_FILE + 100, capabilities=FORMER)
    former = NO_FILE
    # Before it takes memory of its own, and with it.
    assert holdings(wire)[1:] == [[(former, 100)]] * 2
    for _ in range(3):
        link.on_time(script.now_ns)
    assert len(holdings(wire)) == 3
    link.memories.retire(former)
    for _ in range(3):
        link.on_time(script.now_ns)
    assert holdings(wire)[3:] == [[]]
    numbers = [call.number for call, _ in wire.lifeline if isinstance(call.message, Holding)]
    assert numbers == [1, 1, 2, 3]


def test_a_server_that_does_not_ask_is_told_nothing(link: Link, wire: FakeWire, script: Script) -> None:
    script.join()
    link.hang_up(script.now_ns, "killed")
    script.now_ns += SECOND_NS
    script.join(boot_id=2, memory=NO_FILE + 100)
    assert holdings(wire) == []


def test_a_worker_lets_go_of_what_it_is_asked_for(wire: FakeWire) -> None:
    link = make_link(wire, role=Role.WORKER)
    script = Script(link, wire)
    script.join(capabilities=FORMER)
    link.hang_up(script.now_ns, "killed")
    script.now_ns += SECOND_NS
    script.join(boot_id=2, memory=NO_FILE + 100, capabilities=FORMER)
    script.tell(Retire(memories=NO_FILE.to_bytes(8, "little") + (NO_FILE + 100).to_bytes(8, "little")))
    assert [memory for memory, _ in link.memories.places()] == [NO_FILE + 100]
    link.on_time(script.now_ns)
    assert holdings(wire)[-1] == []


def test_what_is_asked_for_while_it_joins_ends_nothing(wire: FakeWire) -> None:
    link = make_link(wire, role=Role.WORKER)
    script = Script(link, wire)
    link.on_time(script.now_ns)
    script.tell(Retire(memories=bytes(8)))
    assert link.state is LinkState.JOINING


FIRST, SECOND = 11, 12


def test_what_a_server_tells_again_is_old(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    for number, text in ((3, "c"), (4, "d"), (3, "c"), (4, "d"), (6, "f")):
        warnings.hear(Warned(number=number, message=text), FIRST)
    assert caplog.messages == [f"the cache server warns: {text}" for text in "cdf"]
    assert warnings.count == 3


def test_another_server_counts_from_its_own_beginning(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    warnings.hear(Warned(number=7, message="old"), FIRST)
    warnings.hear(Warned(number=1, message="new"), SECOND)
    assert caplog.messages == ["the cache server warns: old", "the cache server warns: new"]
    assert warnings.count == 2


def test_beyond_a_number_they_are_counted_alone(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    for number in range(1, MOST_LINES + 50):
        warnings.hear(Warned(number=number, message="again"), FIRST)
    assert len(caplog.messages) == MOST_LINES
    assert caplog.messages[-1].endswith("what follows is in its own log alone")
    assert warnings.count == MOST_LINES + 49
