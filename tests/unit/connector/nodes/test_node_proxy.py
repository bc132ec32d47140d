"""The lowest rank of a node does what the scheduler side wants, and holds what it was given until it is told."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.connector.common.orders import NodeOrders, NodeQuestion, NodeReport
from kvoffload.connector.nodes import node_proxy
from kvoffload.connector.nodes.node_proxy import NodeProxy
from tests.kit.connector.local_client import StockedClient
from tests.kit.connector.nodes import BLOCK, SLOTS, Nodes, make_chain, make_publication

CHAIN = make_chain(1, 3)


def make_proxy() -> tuple[NodeProxy, StockedClient]:
    """Over a server that has the chain."""
    nodes = Nodes()
    nodes.save_on(1, CHAIN)
    return NodeProxy(nodes.clients[1], groups=1), nodes.clients[1]


def report(proxy: NodeProxy, *, is_idle: bool = False) -> NodeReport:
    said = proxy.report(is_idle=is_idle)
    assert said is not None
    return said


def ask(number: int) -> NodeOrders:
    return NodeOrders(questions=(NodeQuestion(number, Ask(CHAIN, alignment=BLOCK)),))


def test_the_first_report_has_slots_and_says_how_the_node_stands() -> None:
    proxy, client = make_proxy()
    first = proxy.begin()
    assert first.state is not None
    assert (first.state.memory_id, first.state.session) == (client.memory_id, client.session)
    assert (first.state.is_served, first.state.most_slots) == (True, (SLOTS,))
    assert [len(slots) for slots in first.slots] == [SLOTS]
    assert proxy.report(is_idle=False) is None


def test_slots_that_never_come_are_not_waited_for_for_ever() -> None:
    proxy, client = make_proxy()
    client.slots_left = 0
    slept: list[float] = []
    assert [len(slots) for slots in proxy.begin(sleep=slept.append).slots] == [0]
    assert sum(slept) == pytest.approx(node_proxy.FIRST_SLOTS_WAIT_S)
    client.is_served = False
    slept.clear()
    proxy.begin(sleep=slept.append)
    assert slept == []


def test_a_lease_is_held_until_its_question_is_over() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    proxy.obey(ask(7))
    (answer,) = report(proxy).answers
    assert (answer.number, answer.found.boundary, answer.came_late) == (7, 12, False)
    assert (client.stats().leases, proxy.list_held()) == (1, [7])
    proxy.obey(NodeOrders(over=(7, 8)))
    assert (client.stats().leases, proxy.list_held()) == (0, [])


def test_an_answer_that_is_not_there_yet_comes_with_a_later_report() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    client.holds_answers = client.answers_when_waited = True
    proxy.obey(ask(1))
    assert proxy.report(is_idle=False) is None
    assert report(proxy, is_idle=True).answers[0].found.is_hit


def test_a_question_that_is_over_before_its_answer_has_none() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    client.holds_answers = True
    proxy.obey(ask(1))
    proxy.obey(NodeOrders(over=(1,)))
    client.answer()
    assert proxy.report(is_idle=False) is None
    assert client.stats().leases == 0


def test_too_many_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_proxy, "MAX_QUESTIONS", 1)
    proxy, _ = make_proxy()
    proxy.begin()
    proxy.obey(ask(1))
    proxy.obey(ask(2))
    outcomes = {answer.number: answer.found.outcome for answer in report(proxy).answers}
    assert outcomes == {1: AcquireOutcome.HIT, 2: AcquireOutcome.OVER_LIMIT}


def test_records_are_published_and_forgotten_and_slots_given_back() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    more = make_chain(2, 2)
    proxy.obey(NodeOrders(published=(make_publication(client, more, shards=2),), aborted=(client.take(0, 1),)))
    assert client.lookup(0, more).all()
    assert len(client.aborted) == 1
    proxy.obey(NodeOrders(invalid=((0, more),)))
    assert not client.lookup(0, more).any()


def test_slots_come_with_the_next_report_as_many_as_there_are() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    client.slots_left = 3
    proxy.obey(NodeOrders(slots={0: 5}))
    assert [len(slots) for slots in report(proxy).slots] == [3]


def test_a_server_that_comes_or_goes_is_told_once() -> None:
    proxy, client = make_proxy()
    proxy.begin()
    client.is_served = False
    state = report(proxy).state
    assert state is not None
    assert not state.is_served
    assert proxy.report(is_idle=False) is None


def test_the_end_closes_its_client() -> None:
    proxy, client = make_proxy()
    proxy.close()
    assert client.is_closed


def test_who_takes_no_slots_waits_for_none() -> None:
    """An engine that only decodes."""
    proxy, client = make_proxy()
    client.slots = 0
    slept: list[float] = []
    assert [len(slots) for slots in proxy.begin(sleep=slept.append).slots] == [0]
    assert slept == []
