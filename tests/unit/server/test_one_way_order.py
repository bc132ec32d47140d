"""One-way messages are served in their order; what was lost is never guessed."""

from __future__ import annotations

import pytest

from kvoffload.protocol import (
    Abort,
    Bye,
    Call,
    Counts,
    Credits,
    Done,
    Error,
    ErrorCode,
    HelloAccepted,
    Prefetch,
    ProtocolFault,
    Quarantine,
    Registered,
    Stats,
    Welcome,
)
from kvoffload.server import ServerLimits
from tests.kit.server.harness import Client, Server, code_of, register_of

PREFETCH = Prefetch(name_space=0, chain=b"")


@pytest.mark.parametrize(("number", "what"), [(3, "gap"), (1, "duplicate"), (2**64 - 1, "gap")])
def test_a_broken_order_quarantines_the_session_and_says_so(
    server: Server, engine: Client, number: int, what: str
) -> None:
    second = server.process().join()
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    assert engine.tell(Abort(tickets=granted.tickets[:8])) is None
    assert engine.tell(PREFETCH) is None
    answer = engine.tell(PREFETCH, number=number)
    assert code_of(answer) is ErrorCode.OUT_OF_ORDER
    assert what in answer.message
    for process in (engine, second):
        (told,) = server.told[process.lifeline]
        assert isinstance(told, Quarantine)
        assert told.code is ErrorCode.OUT_OF_ORDER
        assert code_of(process.ask(Stats())) is ErrorCode.NO_SESSION
    # It keeps what it holds, because its copies may still run.
    server.core.tick()
    assert server.cache.stats.reserved == 1


def test_a_broken_session_is_reopened_with_all_it_held(server: Server, engine: Client) -> None:
    second = server.process().join()
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    engine.lose()
    engine.tell(PREFETCH)
    welcome = engine.greet(former_session=engine.session, former_boot_id=server.settings.boot_id)
    assert isinstance(welcome, Welcome)
    assert welcome.is_reopened
    assert isinstance(engine.connect(), HelloAccepted)
    assert isinstance(engine.ask(register_of()), Registered)
    assert engine.tell(Abort(tickets=granted.tickets)) is None
    assert server.cache.stats.reserved == 0
    # Another process of it has to say hello again, but its lifeline holds.
    assert code_of(second.ask(Stats())) is ErrorCode.NOT_GREETED
    assert isinstance(second.connect(), HelloAccepted)


def test_a_wrong_one_way_frame_is_counted(server: Server, engine: Client) -> None:
    fault = ProtocolFault(code=ErrorCode.TOO_LARGE, message="publish.hashes: too many", op=32, number=1)
    (sent,) = server.core.handle_fault(engine.key, fault)
    assert sent.message == Error(code=ErrorCode.TOO_LARGE, message="publish.hashes: too many", about_op=32)  # type: ignore
    assert engine.tell(PREFETCH, number=2) is None


def test_a_wrong_frame_out_of_order_breaks_it_too(server: Server, engine: Client) -> None:
    fault = ProtocolFault(code=ErrorCode.MALFORMED, message="release: wrong", op=34, number=5)
    answer = server.deliver(server.core.handle_fault(engine.key, fault), key=engine.key)
    assert code_of(answer) is ErrorCode.OUT_OF_ORDER
    assert server.told[engine.lifeline]


@pytest.mark.parametrize("op", [0, 4, 99])
def test_a_wrong_frame_of_anybody_is_answered(server: Server, engine: Client, op: int) -> None:
    fault = ProtocolFault(code=ErrorCode.UNKNOWN_OPERATION, message="op: 99", op=op, number=9)
    for key in (engine.key, b"nobody"):
        answer = server.deliver(server.core.handle_fault(key, fault), key=key)
        assert code_of(answer) is ErrorCode.UNKNOWN_OPERATION
    assert engine.ask(Stats())


def test_a_one_way_message_without_room_breaks_the_order(server: Server, engine: Client) -> None:
    call = Call(message=PREFETCH, number=1, session=engine.session, expires_ns=0)
    answer = server.deliver(server.core.overflow(engine.key, call), key=engine.key)
    assert code_of(answer) is ErrorCode.OUT_OF_ORDER
    assert server.told[engine.lifeline]


def test_a_request_without_room_may_come_again(server: Server, engine: Client) -> None:
    call = Call(message=Stats(), number=9, session=engine.session, expires_ns=0)
    answer = server.deliver(server.core.overflow(engine.key, call), key=engine.key)
    assert code_of(answer) is ErrorCode.BUSY
    assert answer.retryable  # type: ignore[union-attr]
    assert isinstance(engine.ask(Stats()), Counts)


def test_bye_sees_the_loss_of_the_last_message(server: Server, engine: Client) -> None:
    engine.tell(PREFETCH)
    engine.lose()
    assert code_of(engine.ask(Bye(one_way_count=engine.one_way))) is ErrorCode.OUT_OF_ORDER
    assert server.told[engine.lifeline]


def test_bye_ends_the_connection_and_nothing_else(server: Server, engine: Client) -> None:
    engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    engine.tell(PREFETCH)
    assert engine.ask(Bye(one_way_count=1)) == Done()
    assert code_of(engine.ask(Stats())) is ErrorCode.NOT_GREETED
    assert server.cache.stats.reserved == 2


def test_a_forgotten_connection_says_hello_again() -> None:
    with Server(limits=ServerLimits(session_connections=2)) as server:
        clients = [server.process() for _ in range(3)]
        for client in clients:
            client.greet()
        for client in clients[:2]:
            client.connect()
        clients[0].ask(Stats())
        clients[2].connect()
        assert code_of(clients[1].ask(Stats())) is ErrorCode.NOT_GREETED
        assert isinstance(clients[0].ask(Stats()), Counts)
