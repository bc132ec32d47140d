"""Agents' sessions: what their turns asked for and got, of as many as are remembered."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.protocol import AgentSession, AgentSessions, ErrorCode, ListAgentSessions, Query
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import ARRAY_ITEMS
from kvoffload.server.operators import agent_ledger
from kvoffload.server.operators.agent_ledger import AgentLedger
from tests.kit.cache.cache_model import PLAIN, make_chain
from tests.kit.server.explained import explain
from tests.kit.server.harness import UID, Server, code_of, core_settings


def turn(session: str, **changes: Any) -> Query:
    return Query(**({"asked": 100, "promised": 60, "session": session} | changes))


def names_of(ledger: AgentLedger, first: int = 0) -> list[str]:
    return [one.name for one in ledger.list_from(first).sessions]


def test_turns_are_added_and_the_latest_comes_first() -> None:
    ledger = AgentLedger()
    for query in (turn("a"), turn("b", promised=0), turn("a", lower=10, saved_us=7)):
        ledger.take(query)
    told = ledger.list_from(0)
    assert told.total == 2
    assert told.sessions == (
        AgentSession(name="a", turns=2, asked=200, promised=120, lower=10, saved_us=7),
        AgentSession(name="b", turns=1, asked=100, promised=0, lower=0, saved_us=0),
    )


def test_the_one_that_was_quiet_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_ledger, "MAX_AGENTS", 2)
    ledger = AgentLedger()
    for name in ("a", "b", "a", "c"):
        ledger.take(turn(name))
    assert names_of(ledger) == ["c", "a"]


def test_made_up_names_push_out_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_ledger, "MAX_AGENTS", 4)
    ledger = AgentLedger()
    for name in ("a", "b", "c"):
        ledger.take(turn(name), "tenant 1")
    for number in range(8):
        ledger.take(turn(str(number)), "tenant 2")
        ledger.take(turn("b"), "tenant 2")
    assert names_of(ledger) == ["b", "7", "6", "c"]


def test_so_many_as_fit_are_told_and_the_rest_when_it_is_asked_for() -> None:
    ledger = AgentLedger()
    for number in range(ARRAY_ITEMS + 3):
        ledger.take(turn(str(number)))
    assert ledger.list_from(0).total == ARRAY_ITEMS + 3
    assert len(names_of(ledger)) == ARRAY_ITEMS
    assert names_of(ledger, ARRAY_ITEMS) == ["2", "1", "0"]
    assert names_of(ledger, ARRAY_ITEMS + 3) == []


def test_whatever_an_engine_says_fits_an_answer() -> None:
    ledger = AgentLedger()
    for _ in range(2):
        ledger.take(turn("a", promised=200, lower=300, saved_us=U64_MAX))
    (told,) = ledger.list_from(0).sessions
    assert (told.asked, told.promised, told.lower, told.saved_us) == (200, 200, 200, U64_MAX)


def test_a_server_tells_its_operators_alone() -> None:
    with Server(settings=core_settings(operator_uids=frozenset({UID}))) as server:
        engine = server.process().join(PLAIN)
        explain(engine, make_chain(1, 1), session="a", promised=16)
        explain(engine, make_chain(1, 1))
        told = server.process("inspect").watch().ask(ListAgentSessions())
        assert isinstance(told, AgentSessions)
        assert [(one.name, one.turns, one.promised) for one in told.sessions] == [("a", 1, 16)]
    with Server(settings=core_settings(operator_token="secret")) as server:
        observer = server.process("top", uid=77).watch()
        assert code_of(observer.ask(ListAgentSessions())) is ErrorCode.NOT_ALLOWED
