"""The scheduler side's knowledge of another node's server, and its orders for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.cache import Publication, ReservedSlots
from kvoffload.client import HintSettings
from kvoffload.client.credit_stock import CreditStock
from kvoffload.connector.common.orders import NodeAnswer, NodeOrders, NodeQuestion, NodeReport, NodeState

ANSWER_WAIT_S = 10.0
"""How long the scheduler side waits for a node's answer, in seconds. The node answers with the step that asks it, and
vLLM can lose a step's reports."""
_SECOND_NS = 1_000_000_000


class OtherNode:
    """Owned by the scheduler's thread. It holds the node's ready slots, so that planning a save needs no question."""

    def __init__(self, *, groups: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.state = NodeState()
        self._stocks = [CreditStock(group, 0) for group in range(groups)]
        self._asked_s = 0.0
        """When slots were last asked for."""
        self._over: list[int] = []
        self._published: list[Publication] = []
        self._aborted: list[ReservedSlots] = []
        self._invalid: list[tuple[int, bytes]] = []
        self._slots: dict[int, int] = {}
        self._questions: list[NodeQuestion] = []
        self._hints: list[HintSettings] = []

    # ---- what it has said ----

    def hear(self, report: NodeReport) -> tuple[NodeAnswer, ...]:
        """Takes a report of the node, and returns its answers."""
        if report.state is not None:
            former, self.state = self.state, report.state
            if (former.memory_id, former.session) != (self.state.memory_id, self.state.session):
                for stock in self._stocks:
                    stock.clear()
            for stock, most in zip(self._stocks, self.state.most_slots, strict=False):
                stock.high = stock.most = stock.wanted = most
        for slots in report.slots:
            if slots.group < len(self._stocks):
                self._put(self._stocks[slots.group], slots)
        return report.answers

    def count_ready(self, group: int) -> int:
        return len(self._stocks[group])

    # ---- what it is told with the next plan ----

    @property
    def is_asking(self) -> bool:
        """Whether orders wait for the node, or it owes slots, so that the engine must take another step."""
        if (
            self._over
            or self._published
            or self._aborted
            or self._invalid
            or self._slots
            or self._questions
            or self._hints
        ):
            return True
        is_late = self._clock() >= self._asked_s + ANSWER_WAIT_S
        return not is_late and any(stock.is_asking for stock in self._stocks)

    def ask(self, question: NodeQuestion) -> None:
        self._questions.append(question)

    def end(self, number: int) -> None:
        """Ends a question, whose answer or lease is no longer needed."""
        if any(question.number == number for question in self._questions):
            self._questions = [question for question in self._questions if question.number != number]
        else:
            self._over.append(number)

    def take(self, group: int, count: int) -> ReservedSlots:
        """Takes up to `count` of the slots that are held ready."""
        return self._stocks[group].take(self.state.memory_id, self.state.session, count)

    def refill(self) -> None:
        """Asks for slots of the groups that have few left."""
        now_s = self._clock()
        if not self.state.is_served:
            return
        is_late = now_s >= self._asked_s + ANSWER_WAIT_S
        for stock in self._stocks:
            if is_late:
                stock.asked = 0
            count = stock.missing(int(now_s * _SECOND_NS))
            if count:
                stock.asked = count
                self._slots[stock.group] = count
                self._asked_s = now_s

    def publish(self, publication: Publication) -> None:
        self._published.append(publication)

    def abort(self, slots: ReservedSlots) -> None:
        self._aborted.append(slots)

    def invalidate(self, group: int, names: bytes) -> None:
        self._invalid.append((group, names))

    def hint(self, hint: HintSettings) -> None:
        self._hints.append(hint)

    def take_orders(self, retired: tuple[int, ...] = ()) -> NodeOrders:
        """Takes the orders for the node, each once."""
        orders = NodeOrders(
            retired,
            tuple(self._over),
            tuple(self._published),
            tuple(self._aborted),
            tuple(self._invalid),
            self._slots,
            tuple(self._questions),
            tuple(self._hints),
        )
        self._over, self._published, self._aborted, self._invalid, self._questions = [], [], [], [], []
        self._slots, self._hints = {}, []
        return orders

    # ---- inside ----

    def _put(self, stock: CreditStock, slots: ReservedSlots) -> None:
        stock.asked = 0
        if (slots.memory_id, slots.session) != (self.state.memory_id, self.state.session):
            return
        stock.put(slots.tickets, slots.addresses)
        if 2 * len(stock) < stock.high:
            # The server has no more room now, so the next question waits a little.
            stock.not_before_ns = int((self._clock() + 0.05) * _SECOND_NS)
