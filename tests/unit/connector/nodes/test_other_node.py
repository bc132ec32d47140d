"""The scheduler side's picture of another node, and the messages that it sends it, once each."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.cache import Ask, ReservedSlots
from kvoffload.connector.common.orders import NodeQuestion, NodeReport, NodeState
from kvoffload.connector.nodes.other_node import ANSWER_WAIT_S, OtherNode

SERVED = NodeState(memory_id=3, session=5, is_served=True, most_slots=(8,))


class Clock:
    """Stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_node(state: NodeState = SERVED, *, slots: int = 8) -> tuple[OtherNode, Clock]:
    clock = Clock()
    node = OtherNode(groups=1, clock=clock)
    node.hear(NodeReport(state, slots=(make_slots(slots),)))
    return node, clock


def make_slots(count: int, *, memory_id: int = 3, group: int = 0) -> ReservedSlots:
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return ReservedSlots(memory_id, 5, group, numbers, 64 * numbers)


def test_slots_are_taken_without_asking_and_asked_for_when_they_run_low() -> None:
    node, _ = make_node()
    assert node.take(0, 3).tickets.tolist() == [1, 2, 3]
    node.refill()
    assert not node.is_asking
    taken = node.take(0, 3)
    assert (taken.memory_id, taken.session, taken.addresses.tolist()) == (3, 5, [256, 320, 384])
    node.refill()
    assert node.is_asking
    assert node.take_orders().slots == {0: 6}
    assert node.is_asking
    node.hear(NodeReport(slots=(make_slots(6),)))
    assert (node.count_ready(0), node.is_asking) == (8, False)


def test_a_node_that_has_no_room_is_asked_again_a_moment_later() -> None:
    node, clock = make_node(slots=0)
    node.refill()
    assert not node.is_asking
    clock.now_s += 1
    node.refill()
    assert node.take_orders().slots == {0: 8}


def test_a_node_that_never_answers_is_asked_again_and_not_waited_for() -> None:
    node, clock = make_node()
    node.take(0, 8)
    node.refill()
    node.take_orders()
    clock.now_s += ANSWER_WAIT_S
    assert not node.is_asking
    node.refill()
    assert node.take_orders().slots == {0: 8}


def test_slots_of_a_former_memory_are_nobodys() -> None:
    node, _ = make_node()
    node.hear(NodeReport(NodeState(memory_id=4, session=5, is_served=True, most_slots=(8,))))
    assert node.count_ready(0) == 0
    node.hear(NodeReport(slots=(make_slots(6), make_slots(6, memory_id=4, group=9))))
    assert node.count_ready(0) == 0
    node.hear(NodeReport(slots=(make_slots(6, memory_id=4),)))
    assert node.count_ready(0) == 6


def test_a_node_without_a_server_is_asked_for_nothing() -> None:
    node, _ = make_node(NodeState(most_slots=(8,)), slots=0)
    node.refill()
    assert node.take_orders().is_empty


def test_what_is_to_be_told_is_told_once_and_a_question_that_is_over_before_it_never() -> None:
    node, _ = make_node()
    for number in (1, 2):
        node.ask(NodeQuestion(number, Ask(b"")))
    node.end(1)
    node.end(9)
    node.invalidate(0, b"a" * 32)
    node.abort(make_slots(1))
    assert node.is_asking
    orders = node.take_orders((4,))
    assert [question.number for question in orders.questions] == [2]
    assert (orders.retired, orders.over, orders.invalid) == ((4,), (9,), ((0, b"a" * 32),))
    assert len(orders.aborted) == 1
    assert not node.is_asking
    assert node.take_orders().is_empty
