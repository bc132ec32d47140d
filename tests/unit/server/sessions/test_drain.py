"""When a server may end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.protocol import (
    Abort,
    Acquire,
    AcquireEntries,
    Closing,
    ClosingReason,
    Credits,
    Drain,
    Draining,
    ErrorCode,
    Registered,
    Welcome,
)
from kvoffload.server.sessions.drain import DrainState
from tests.kit.cache.cache_model import make_chain
from tests.kit.server.harness import UID, Server, code_of, core_settings, register_of

MS = 1_000_000


@pytest.mark.parametrize(
    ("starts", "now_ns", "holds_something", "is_over"),
    [
        ([], 0, False, False),
        ([(0, 0)], 0, False, True),
        ([(0, 0)], 10**18, True, False),
        ([(0, 5)], 5 * MS - 1, True, False),
        ([(0, 5)], 5 * MS, True, True),
        ([(0, 5), (0, 9)], 5 * MS, True, True),
        ([(0, 5), (1 * MS, 1)], 2 * MS, True, True),
        ([(0, 5), (0, 0)], 5 * MS, True, True),
    ],
)
def test_a_deadline_only_comes_nearer(
    starts: list[tuple[int, int]], now_ns: int, holds_something: bool, is_over: bool
) -> None:
    state = DrainState()
    began = [state.start(*start) for start in starts]
    assert began == [True, *[False] * (len(starts) - 1)][: len(starts)]
    assert state.is_over(now_ns, holds_something=holds_something) is is_over


@pytest.fixture
def operated() -> Iterator[Server]:
    with Server(settings=core_settings(operator_uids=frozenset({0}), operator_token="secret")) as made:
        yield made


@pytest.mark.parametrize(
    ("uid", "token", "is_allowed"),
    [(0, "", True), (UID, "secret", True), (UID, "", False), (UID, "s\u00e9cret", False)],
)
def test_only_operators_drain(operated: Server, uid: int, token: str, is_allowed: bool) -> None:
    observer = operated.process("operator", uid=uid).watch()
    answer = observer.ask(Drain(token=token))
    assert isinstance(answer, Draining) if is_allowed else code_of(answer) is ErrorCode.NOT_ALLOWED
    assert operated.core.is_drained(0) == is_allowed


def test_without_a_token_of_its_own_a_server_takes_none() -> None:
    with Server() as server:
        assert code_of(server.process("operator").watch().ask(Drain(token=""))) is ErrorCode.NOT_ALLOWED


def test_a_draining_server_takes_nothing_new_and_serves_what_is_held(operated: Server) -> None:
    engine = operated.process().join()
    chain = make_chain(1, 1)
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    operator = operated.process("operator", uid=0).watch()
    left = operator.ask(Drain(deadline_ms=1000))
    assert (left.leases, left.reserved, left.sessions) == (0, 2, 2)
    (told,) = operated.told[engine.lifeline]
    assert told == Closing(reason=ClosingReason.REPLACED, retry_after_ms=operated.settings.successor_after_ms)
    for message in (
        Acquire(name_space=engine.name_space, chain=chain),
        AcquireEntries(name_space=engine.name_space, group=0, hashes=chain),
        Credits(name_space=engine.name_space, group=0, count=1),
    ):
        assert code_of(engine.ask(message)) is ErrorCode.DRAINING
    assert code_of(operated.process("late").greet()) is ErrorCode.DRAINING
    assert not operated.core.is_drained(operated.now_ns)
    # A connection that broke may come back for its releases.
    engine.connect()
    assert isinstance(engine.ask(register_of()), Registered)
    assert engine.tell(Abort(tickets=granted.tickets)) is None
    assert operated.core.is_drained(operated.now_ns)
    # Told once only.
    operator.ask(Drain())
    assert len(operated.told[engine.lifeline]) == 1


def test_who_has_lost_its_lifeline_comes_back_to_a_draining_server(operated: Server) -> None:
    engine = operated.process().join()
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    operated.deliver(operated.core.start_drain(0))
    session, former = engine.session, engine.lifeline
    operated.core.close_lifeline(engine.lifeline)
    welcome = engine.greet(former_session=session, former_boot_id=operated.settings.boot_id)
    assert isinstance(welcome, Welcome)
    assert welcome.is_reopened
    assert operated.told[engine.lifeline] == operated.told[former] != []
    engine.connect()
    assert isinstance(engine.ask(register_of()), Registered)
    assert code_of(engine.ask(Credits(name_space=engine.name_space, group=0, count=1))) is ErrorCode.DRAINING
    assert not operated.core.is_drained(0)
    engine.tell(Abort(tickets=granted.tickets))
    assert operated.core.is_drained(0)


def test_a_drain_ends_at_its_deadline(operated: Server) -> None:
    engine = operated.process().join()
    engine.ask(Credits(name_space=engine.name_space, group=0, count=2))
    operated.deliver(operated.core.start_drain(0, reason=ClosingReason.ENDED, deadline_ms=2))
    assert operated.told[engine.lifeline] == [Closing(reason=ClosingReason.ENDED)]
    assert not operated.core.is_drained(1_999_999)
    assert operated.core.is_drained(2_000_000)
