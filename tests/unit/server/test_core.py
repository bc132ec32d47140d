"""Clients that are served, their order, and the answers to everything else. Blocks have a test of their own."""

from __future__ import annotations

import pytest

from kvoffload.cache import NO_LIMIT
from kvoffload.protocol import (
    CAPABILITIES,
    MESSAGES,
    Abort,
    Bye,
    Call,
    Channel,
    ClientMessage,
    Counts,
    Credits,
    Done,
    Error,
    ErrorCode,
    Explain,
    Greeting,
    HandshakeSettings,
    Hello,
    HelloAccepted,
    Mark,
    Prefetch,
    Promote,
    Register,
    Registered,
    Role,
    Stats,
    Subscribe,
    Subscribed,
    Welcome,
)
from kvoffload.protocol.message import OneWay
from kvoffload.protocol.shape import Shape
from kvoffload.server import DomainSettings, Peer, SendMemory, ToConnection, ToLifeline
from kvoffload.server.core import CLOCKS_DIFFER_S
from kvoffload.server.sessions.outbox import OpenExpress
from tests.kit.cache.cache_model import make_chain
from tests.kit.protocol.examples import make_example
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import UID, Client, FakePidfd, Server, code_of, core_settings, register_of


def test_the_opening_is_answered_step_by_step(server: Server) -> None:
    process = server.process()
    welcome = process.greet()
    assert isinstance(welcome, Welcome)
    assert (welcome.domain, welcome.is_reopened, welcome.seen_uid) == ("main", False, UID)
    assert [sent.lifeline for sent in server.memory_sent] == [process.lifeline]
    accepted = process.connect(capabilities=("events", "later"))
    assert isinstance(accepted, HelloAccepted)
    assert (accepted.protocol, accepted.capabilities, accepted.domain) == (1, ("events",), "main")
    assert process.ask(register_of()) == Registered(name_space=0, held_limit_bytes=NO_LIMIT, resume=process.session)


def test_an_engine_is_one_session_with_all_its_processes(server: Server) -> None:
    first, second = server.process().join(), server.process().join(rank=1, ranks=1)
    assert first.session == second.session
    assert len(server.core.sessions) == 1
    assert server.process("other").join().session != first.session


def test_engines_of_one_identity_may_have_other_numbers_of_ranks(server: Server) -> None:
    """Those that share units of heads. The processes of one engine may not."""
    one, other = server.process().join(), server.process("other").join(ranks=2)
    assert one.name_space == other.name_space
    late = server.process("other")
    late.greet()
    late.connect()
    answer = late.ask(register_of(ranks=1))
    assert code_of(answer) is ErrorCode.MISMATCH


PREFETCH = Prefetch(name_space=0, chain=b"")
NEED_REGISTER: list[ClientMessage] = [Promote(name_space=0, chain=b""), Explain(queries=())]


@pytest.mark.parametrize(
    "message", [register_of(), Stats(), *NEED_REGISTER, PREFETCH], ids=lambda message: type(message).__name__
)
def test_nothing_is_served_before_hello(server: Server, message: ClientMessage) -> None:
    process = server.process()
    process.greet()
    assert code_of(process.ask(message)) is ErrorCode.NOT_GREETED


@pytest.mark.parametrize("message", NEED_REGISTER, ids=lambda message: type(message).__name__)
def test_blocks_are_not_named_before_register(server: Server, message: ClientMessage) -> None:
    process = server.process()
    process.greet()
    process.connect()
    assert code_of(process.ask(message)) is ErrorCode.NOT_REGISTERED


def test_a_one_way_message_before_register_is_refused_and_counted(server: Server) -> None:
    process = server.process()
    process.greet()
    process.connect()
    assert code_of(process.tell(PREFETCH)) is ErrorCode.NOT_REGISTERED
    assert isinstance(process.ask(register_of()), Registered)
    assert process.tell(PREFETCH) is None


@pytest.mark.parametrize(
    ("hello", "code", "field"),
    [
        ({"protocol_min": 3, "protocol_max": 4}, ErrorCode.VERSION, "protocol"),
        ({"domain": "elsewhere"}, ErrorCode.MISMATCH, "domain"),
    ],
)
def test_a_refused_hello_changes_nothing(server: Server, hello: dict[str, object], code: ErrorCode, field: str) -> None:
    process = server.process()
    process.greet()
    refused = process.connect(**hello)
    assert code_of(refused) is code
    assert refused.field == field  # type: ignore[union-attr]
    assert code_of(process.ask(Stats())) is ErrorCode.NOT_GREETED
    assert process.ask(Bye()) == Done()


def test_hello_begins_all_counts_anew(engine: Client) -> None:
    engine.tell(PREFETCH)
    hello = Hello(protocol_min=1, protocol_max=1, capabilities=("prefetch",))
    assert isinstance(engine.ask(hello), HelloAccepted)
    assert code_of(engine.ask(NEED_REGISTER[0])) is ErrorCode.NOT_REGISTERED
    assert isinstance(engine.ask(register_of()), Registered)
    assert engine.tell(PREFETCH, number=1) is None


def test_a_capability_that_was_not_agreed_is_not_served(server: Server) -> None:
    process = server.process()
    process.greet()
    process.connect(capabilities=())
    process.ask(register_of())
    assert code_of(process.ask(Subscribe())) is ErrorCode.UNSUPPORTED
    assert code_of(process.tell(Prefetch(name_space=0, chain=b""))) is ErrorCode.UNSUPPORTED


def test_a_prefetch_is_taken(engine: Client) -> None:
    assert engine.tell(Prefetch(name_space=engine.name_space, chain=make_chain(1, 4))) is None


@pytest.mark.parametrize("session", [0, 12345])
def test_a_session_that_is_not_known_is_not_served(engine: Client, session: int) -> None:
    assert code_of(engine.ask(Stats(), session=session)) is ErrorCode.NO_SESSION


def test_a_connection_speaks_for_its_own_session_only(server: Server, engine: Client) -> None:
    other = server.process("other").join()
    assert code_of(engine.ask(Stats(), session=other.session)) is ErrorCode.NO_SESSION
    assert code_of(engine.ask(Hello(protocol_min=1, protocol_max=1), session=other.session)) is ErrorCode.NO_SESSION


def test_a_number_is_answered_as_it_came(server: Server, engine: Client) -> None:
    call = Call(message=Stats(), number=77, session=engine.session, expires_ns=0)
    (sent,) = server.core.handle(engine.key, call, server.now_ns)
    assert (sent.connection, sent.number) == (engine.key, 77)  # type: ignore[union-attr]


# ---- time ----


def test_a_late_request_is_dropped_unanswered(server: Server, engine: Client) -> None:
    engine.expires_ns = server.now_ns
    assert engine.ask(Stats()) is None
    assert engine.ask(Hello(protocol_min=1, protocol_max=1)) is None
    engine.expires_ns = server.now_ns + 1
    assert isinstance(engine.ask(Stats()), Counts)


def test_a_late_one_way_message_is_counted_and_not_served(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Call] = []
    monkeypatch.setattr(server.core.tiers, "serve", lambda _, call, __: served.append(call))
    engine.expires_ns = server.now_ns
    assert engine.tell(PREFETCH) is None
    assert served == []
    engine.expires_ns = 0
    assert engine.tell(PREFETCH) is None
    assert [call.number for call in served] == [2]


def test_a_late_greeting_is_dropped_with_its_pidfd(server: Server) -> None:
    process = server.process()
    server.now_ns = 50
    pidfd = FakePidfd(1)
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER)
    call = Call(message=greeting, number=1, session=0, expires_ns=50)
    assert server.core.greet(process.lifeline, call, Peer(pid=1, uid=UID), pidfd, 50) == []
    assert pidfd.is_closed
    assert len(server.core.sessions) == 0


def test_a_process_with_another_clock_is_told_so(server: Server) -> None:
    """In a time namespace whose clock is behind, each request would be late, and the server would answer none."""
    process = server.process()
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER)
    call = Call(message=greeting, number=1, session=0, expires_ns=50)
    now_ns = 50 + CLOCKS_DIFFER_S * 1_000_000_000
    (sent,) = server.core.greet(process.lifeline, call, Peer(pid=1, uid=UID), FakePidfd(1), now_ns)
    assert isinstance(sent, ToLifeline)
    assert isinstance(sent.message, Error)
    assert sent.message.code is ErrorCode.MISMATCH
    assert "clock is 60 s ahead of the process's: run both in one time namespace" in sent.message.message
    assert not sent.message.retryable
    assert len(server.core.sessions) == 0


# ---- faults ----


def test_a_fault_of_the_cache_is_internal_and_logged_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk on\nfire")

    engine = server.process()
    engine.greet()
    engine.connect()
    monkeypatch.setattr(server.cache, "open_namespace", fail)
    for _ in range(3):
        answer = engine.ask(register_of())
        assert code_of(answer) is ErrorCode.INTERNAL
        assert answer.message == "register: OSError: disk on fire"
        assert answer.retryable
    assert len([record for record in caplog.records if record.exc_info]) == 1
    monkeypatch.undo()
    assert isinstance(engine.ask(register_of()), Registered)


def test_a_one_way_message_that_met_a_fault_is_counted(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.core.tiers, "serve", None)
    assert code_of(engine.tell(PREFETCH)) is ErrorCode.INTERNAL
    monkeypatch.undo()
    assert engine.tell(PREFETCH) is None


# ---- memory that comes later, observers, counts ----


def test_a_server_without_memory_yet_says_so() -> None:
    with Server(memory=None) as server:
        process = server.process()
        process.greet()
        process.connect()
        assert server.memory_sent == []
        assert code_of(process.ask(register_of())) is ErrorCode.BUSY
        assert code_of(process.ask(Stats())) is ErrorCode.BUSY


def test_an_observer_sees_counts_and_has_no_blocks(server: Server, engine: Client) -> None:
    observer = server.process("top").watch()
    assert [sent.lifeline for sent in server.memory_sent] == [engine.lifeline]
    assert isinstance(observer.ask(Stats()), Counts)
    assert code_of(observer.ask(register_of())) is ErrorCode.NOT_ALLOWED
    assert observer.ask(Subscribe()) == Subscribed()
    server.core.close_lifeline(observer.lifeline)
    assert len(server.core.sessions) == 1


def test_counts_are_those_of_the_cache(server: Server, engine: Client) -> None:
    engine.ask(Credits(name_space=engine.name_space, group=1, count=3))
    counts = engine.ask(Stats())
    assert (counts.reserved, counts.used_bytes, counts.sessions) == (3, 3 * 4096, 1)
    assert counts.capacity_bytes == server.cache.stats.capacity_bytes


# ---- domains ----


def test_no_domain_hears_of_another() -> None:
    domains = [DomainSettings(name="red", uids=frozenset({1})), DomainSettings(name="blue", uids=frozenset({2}))]
    with Server(domains=domains) as server:
        red, blue = server.process(uid=1).join(), server.process(uid=2).join()
        assert [sent.domain for sent in server.memory_sent] == ["red", "blue"]
        assert red.session != blue.session
        red.ask(Credits(name_space=red.name_space, group=0, count=2))
        assert (red.ask(Stats()).reserved, blue.ask(Stats()).reserved) == (2, 0)
        observer = server.process("router", uid=2).watch()
        observer.ask(Subscribe())
        save_chain(server.caches["red"], red, make_chain(1, 4))
        assert server.core.feed.take(observer.key, 10) == []
        save_chain(server.caches["blue"], blue, make_chain(1, 4))
        assert server.core.feed.take(observer.key, 10) != []


def test_every_kind_of_message_has_somebody_who_serves_it(engine: Client) -> None:
    """No message of the control channel falls through to a fault."""
    for kind in MESSAGES:
        if not issubclass(kind, ClientMessage) or Channel.CONTROL not in kind.channels or kind in (Hello, Register):
            continue
        message = make_example(Shape(kind), version=1)
        answer = engine.tell(message) if issubclass(kind, OneWay) else engine.ask(message)
        assert not isinstance(answer, Error) or answer.code is not ErrorCode.INTERNAL, answer
        engine.server.process(f"after {kind.__name__}").join()
        if kind is Bye:
            engine.greet(former_session=engine.session, former_boot_id=engine.server.settings.boot_id)
            engine.connect()
            engine.ask(register_of())


def test_settings_of_the_handshake_are_the_servers() -> None:
    settings = core_settings(handshake=HandshakeSettings(capabilities=CAPABILITIES, domain="", hash_algorithm="blake3"))
    with Server(settings=settings) as server:
        process = server.process()
        process.greet()
        process.connect()
        refused = process.ask(register_of())
        assert (code_of(refused), refused.field) == (ErrorCode.MISMATCH, "hash_algorithm")


def test_a_mark_is_answered_behind_what_came_before_it(server: Server, engine: Client) -> None:
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=1))
    engine.tell(Abort(tickets=granted.tickets))
    assert engine.ask(Mark()) == Done()
    assert server.cache.stats.reserved == 0


def test_a_mark_is_for_those_who_are_greeted(server: Server) -> None:
    assert server.process("watcher").watch().ask(Mark()) == Done()
    process = server.process()
    process.greet()
    assert code_of(process.ask(Mark())) is ErrorCode.NOT_GREETED


def test_an_express_channel_comes_behind_what_it_needs(server: Server) -> None:
    """It comes behind the answer to the process that registered, or behind welcome and memory: a process that has the
    channel can use it."""
    first, second = (server.process(wants_express=True) for _ in range(2))
    first.greet()
    first.connect()
    call = Call(message=register_of(), number=9, session=first.session, expires_ns=0)
    answer, opened = server.core.handle(first.key, call, server.now_ns)
    assert isinstance(answer, ToConnection)
    assert isinstance(opened, OpenExpress)
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER, wants_express=True)
    sent = server.core.greet(second.lifeline, Call(greeting, 1, 0, 0), Peer(pid=1, uid=UID), second.pidfd, 0)
    assert [type(one) for one in sent] == [ToLifeline, SendMemory, OpenExpress]
    assert [one.lifeline for one in (opened, sent[-1]) if isinstance(one, OpenExpress)] == [
        first.lifeline,
        second.lifeline,
    ]
