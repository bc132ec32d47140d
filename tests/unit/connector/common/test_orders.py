"""Orders and reports of nodes are plain values: they say when they are empty, and add up."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from multiprocessing.reduction import ForkingPickler

from kvoffload.cache import AcquiredBlocks, AcquireOutcome, Ask
from kvoffload.connector.common.orders import NodeAnswer, NodeOrders, NodeQuestion, NodeReport, NodeState

MISS = AcquiredBlocks(AcquireOutcome.MISS, 0)


@pytest.mark.parametrize(
    "orders",
    [
        NodeOrders(retired=(1,)),
        NodeOrders(over=(1,)),
        NodeOrders(invalid=((0, b"a" * 32),)),
        NodeOrders(slots={0: 1}),
        NodeOrders(questions=(NodeQuestion(1, Ask(b"")),)),
    ],
)
def test_any_order_is_one(orders: NodeOrders) -> None:
    assert not orders.is_empty
    assert not ForkingPickler.loads(ForkingPickler.dumps(orders)).is_empty


def test_no_orders_are_none() -> None:
    assert NodeOrders().is_empty


def test_what_is_said_later_comes_later_and_the_last_state_counts() -> None:
    first = NodeReport(NodeState(memory_id=1), (NodeAnswer(1, MISS),))
    later = NodeReport(NodeState(memory_id=2), (NodeAnswer(2, MISS, came_late=True),))
    both = first.add(later)
    assert both.state == NodeState(memory_id=2)
    assert [answer.number for answer in both.answers] == [1, 2]
    assert first.add(NodeReport()).state == NodeState(memory_id=1)
