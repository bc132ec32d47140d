"""Connections over TCP: observers without a process, a session or a clock of this machine."""

from __future__ import annotations

import pytest

from kvoffload.protocol import (
    MESSAGES,
    Bye,
    Call,
    Channel,
    ClientMessage,
    Counts,
    Done,
    Drain,
    Draining,
    Error,
    ErrorCode,
    Hello,
    HelloAccepted,
    Prefetch,
    Stats,
    Subscribe,
    Subscribed,
)
from kvoffload.protocol.shape import Shape
from kvoffload.server import DomainSettings, ServerLimits
from tests.kit.cache.cache_model import make_chain
from tests.kit.protocol.examples import make_example
from tests.kit.server.chains import save_chain
from tests.kit.server.guests import HELLO, Visitor
from tests.kit.server.harness import Client, Server, code_of, core_settings, register_of

PREFETCH = Prefetch(name_space=0, chain=b"")


def test_a_guest_is_an_observer(server: Server, engine: Client) -> None:
    visitor = Visitor(server)
    accepted = visitor.ask(HELLO)
    assert isinstance(accepted, HelloAccepted)
    assert accepted.domain == "main"
    assert isinstance(visitor.ask(Stats()), Counts)
    assert visitor.ask(Subscribe()) == Subscribed()
    save_chain(server.cache, engine, make_chain(1, 4))
    assert server.core.feed.take(visitor.key, 10)
    assert code_of(visitor.ask(register_of())) is ErrorCode.NOT_ALLOWED
    assert len(server.core.sessions) == 2
    assert [sent.lifeline for sent in server.memory_sent] == [engine.lifeline]
    assert visitor.ask(Bye()) == Done()
    assert len(server.core.sessions) == 1
    assert server.core.feed.ready() == []


def test_nothing_is_served_before_hello_and_nothing_kept(server: Server) -> None:
    visitor = Visitor(server)
    for message in (Stats(), register_of(), Drain(), PREFETCH):
        assert code_of(visitor.ask(message)) is ErrorCode.NO_SESSION
    assert visitor.ask(Bye()) == Done()
    assert code_of(visitor.ask(Hello(protocol_min=7, protocol_max=8))) is ErrorCode.VERSION
    assert code_of(visitor.ask(Hello(protocol_min=1, protocol_max=1, domain="other"))) is ErrorCode.MISMATCH
    assert len(server.core.sessions) == 0


def test_a_refused_second_hello_changes_nothing(server: Server) -> None:
    visitor = Visitor(server)
    visitor.ask(HELLO)
    assert code_of(visitor.ask(Hello(protocol_min=7, protocol_max=8))) is ErrorCode.VERSION
    assert isinstance(visitor.ask(Stats()), Counts)
    assert isinstance(visitor.ask(HELLO), HelloAccepted)
    assert isinstance(visitor.ask(Stats()), Counts)
    assert len(server.core.sessions) == 1


def test_no_session_of_this_machine_is_spoken_for_over_tcp(server: Server, engine: Client) -> None:
    visitor = Visitor(server)
    assert code_of(visitor.ask(HELLO, session=engine.session)) is ErrorCode.NO_SESSION
    assert len(server.core.sessions) == 1
    visitor.ask(HELLO)
    for message in (Stats(), HELLO, Bye()):
        assert code_of(visitor.ask(message, session=engine.session)) is ErrorCode.NO_SESSION
    assert isinstance(engine.ask(Stats()), Counts)


def test_nobody_of_this_machine_speaks_for_a_guest(server: Server, engine: Client) -> None:
    visitor = Visitor(server, is_operator=True)
    visitor.ask(HELLO)
    (guest,) = (session for session in server.core.sessions if session.guest is not None)
    process = server.process("thief")
    process.greet()
    process.session = guest.number
    assert code_of(process.connect()) is ErrorCode.NO_SESSION
    assert code_of(process.ask(Drain())) is ErrorCode.NOT_GREETED


def test_another_machines_clock_says_nothing(server: Server) -> None:
    visitor = Visitor(server)
    server.now_ns = 1_000_000
    assert isinstance(visitor.ask(HELLO, expires_ns=1), HelloAccepted)
    assert isinstance(visitor.ask(Stats(), expires_ns=1), Counts)


@pytest.mark.parametrize(
    ("is_operator", "token", "is_allowed"),
    [(False, "", False), (True, "", True), (False, "secret", True), (False, "wrong", False)],
)
def test_a_guest_drains_by_its_key_or_a_token(is_operator: bool, token: str, is_allowed: bool) -> None:
    # A guest has no user: it is not mistaken for one that may.
    with Server(settings=core_settings(operator_uids=frozenset({0, -1}), operator_token="secret")) as server:
        visitor = Visitor(server, is_operator=is_operator)
        visitor.ask(HELLO)
        answer = visitor.ask(Drain(token=token))
        if is_allowed:
            assert isinstance(answer, Draining)
        else:
            assert code_of(answer) is ErrorCode.NOT_ALLOWED
            assert answer.message == "drain: who comes over TCP with this key is no operator here"


def test_guests_see_their_own_domain_only() -> None:
    with Server(domains=[DomainSettings(name="red"), DomainSettings(name="blue")]) as server:
        red = server.process(uid=1).join()
        visitors = {name: Visitor(server, name) for name in ("red", "blue")}
        for visitor in visitors.values():
            visitor.ask(HELLO)
            visitor.ask(Subscribe())
        save_chain(server.caches["red"], red, make_chain(1, 4))
        assert server.core.feed.take(visitors["red"].key, 10)
        assert server.core.feed.take(visitors["blue"].key, 10) == []
        assert (visitors["red"].ask(Stats()).readable > 0, visitors["blue"].ask(Stats()).readable) == (True, 0)


def test_beyond_the_bound_the_one_that_was_silent_longest_goes() -> None:
    with Server(limits=ServerLimits(guests=2)) as server:
        first, second, third = Visitor(server), Visitor(server), Visitor(server)
        first.ask(HELLO)
        second.ask(HELLO)
        first.ask(Stats())
        third.ask(HELLO)
        assert len(server.core.sessions) == 2
        assert code_of(second.ask(Stats())) is ErrorCode.NO_SESSION
        assert isinstance(first.ask(Stats()), Counts)
        assert isinstance(third.ask(Stats()), Counts)


def test_guests_take_no_room_beyond_the_sessions() -> None:
    with Server(limits=ServerLimits(sessions=1)) as server:
        server.process().join()
        assert code_of(Visitor(server).ask(HELLO)) is ErrorCode.BUSY
        assert len(server.core.sessions) == 1


def test_a_closed_connection_ends_its_guest(server: Server) -> None:
    visitor = Visitor(server)
    visitor.ask(HELLO)
    server.core.close_connection(visitor.key)
    assert len(server.core.sessions) == 0
    assert code_of(visitor.ask(Stats())) is ErrorCode.NO_SESSION


def test_a_gap_of_a_guest_ends_it(server: Server) -> None:
    visitor = Visitor(server)
    visitor.ask(HELLO)
    assert code_of(visitor.ask(PREFETCH, number=2)) is ErrorCode.OUT_OF_ORDER
    assert len(server.core.sessions) == 0
    assert isinstance(visitor.ask(HELLO), HelloAccepted)


def test_every_kind_of_message_of_a_guest_is_answered(server: Server) -> None:
    for kind in MESSAGES:
        if not issubclass(kind, ClientMessage) or Channel.CONTROL not in kind.channels:
            continue
        visitor = Visitor(server)
        visitor.ask(HELLO)
        answer = visitor.ask(make_example(Shape(kind), version=1))
        assert not isinstance(answer, Error) or answer.code is not ErrorCode.INTERNAL, answer


@pytest.mark.parametrize(("uid", "is_allowed"), [(1, True), (2, False), (-1, False), (None, True)])
def test_a_session_is_for_connections_of_its_user(uid: int | None, is_allowed: bool) -> None:
    """Another user cannot use a session by learning or guessing its number. None: there are no users to tell apart, and
    one domain."""
    with Server() as server:
        process = server.process(uid=1)
        process.greet()
        call = Call(message=HELLO, number=1, session=process.session, expires_ns=0)
        (sent,) = server.core.handle(b"key", call, server.now_ns, uid=uid)
        assert isinstance(sent.message, HelloAccepted) is is_allowed  # type: ignore[union-attr]
        if not is_allowed:
            assert code_of(sent.message) is ErrorCode.NO_SESSION  # type: ignore[union-attr]
