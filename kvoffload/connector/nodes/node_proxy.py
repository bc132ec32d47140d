"""The lowest rank of a node asks its server for the scheduler side, which runs on another machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.cache import AcquiredBlocks, AcquireOutcome, BlockLease
from kvoffload.client import PendingAcquire
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.orders import NodeAnswer, NodeOrders, NodeQuestion, NodeReport, NodeState

MAX_QUESTIONS = 4096
"""Maximum number of questions that are open or have a lease. Any further one is answered as a miss."""
FIRST_SLOTS_WAIT_S = 1.0
"""How long the engine's start waits for slots, in seconds, so that its first request can be saved."""
_LOOK_S = 0.005


class NodeProxy:
    """Owned by the worker's thread. Its server answers each question, or the client's deadline makes it a miss."""

    def __init__(self, cache: CacheClient, *, groups: int) -> None:
        """Takes a client of its own, which acts as the scheduler side's client of the node's server."""
        self.cache = cache
        self._groups = groups
        self._open: dict[int, PendingAcquire] = {}
        self._leases: dict[int, BlockLease] = {}
        self._wanted: dict[int, int] = {}
        self._refused: list[NodeAnswer] = []
        self._told: NodeState | None = None

    def begin(self, *, sleep: Callable[[float], None] = time.sleep) -> NodeReport:
        """Returns the first report, which goes with the handshake: the server's state, and slots for the first
        saves."""
        for _ in range(int(FIRST_SLOTS_WAIT_S / _LOOK_S)):
            ready = enumerate(self.cache.ready_slots())
            if not self.cache.is_served or all(count or not self.cache.most_slots(group) for group, count in ready):
                break
            sleep(_LOOK_S)
        self._wanted = {group: self.cache.most_slots(group) for group in range(self._groups)}
        return self.report(is_idle=False) or NodeReport()

    def obey(self, orders: NodeOrders) -> None:
        """Carries out the scheduler side's orders; answers to its questions come with a report."""
        for number in orders.over:
            pending, lease = self._open.pop(number, None), self._leases.pop(number, None)
            if pending is not None:
                self.cache.cancel(pending)
            if lease is not None:
                self.cache.release(lease)
        for publication in orders.published:
            self.cache.publish(publication)
        for slots in orders.aborted:
            self.cache.abort(slots)
        for group, names in orders.invalid:
            self.cache.invalidate(group, names)
        self._wanted.update(orders.slots)
        for question in orders.questions:
            self._ask(question)
        for hint in orders.hints:
            self.cache.start_hint(hint)

    def report(self, *, is_idle: bool) -> NodeReport | None:
        """Returns what is new; None: nothing is. If `is_idle`, it may wait for answers within a step's budget."""
        self.cache.begin_step()
        answers = [*self._refused]
        self._refused.clear()
        for number, pending in list(self._open.items()):
            found = self.cache.poll(pending) or (self.cache.wait_for(pending) if is_idle else None)
            if found is not None:
                del self._open[number]
                if found.lease is not None:
                    self._leases[number] = found.lease
                answers.append(NodeAnswer(number, found, pending.came_late))
        wanted, self._wanted = self._wanted, {}
        slots = tuple(self.cache.take(group, count) for group, count in wanted.items())
        state: NodeState | None = self._describe()
        if state == self._told:
            state = None
        else:
            self._told = state
        return NodeReport(state, tuple(answers), slots) if state or answers or slots else None

    def list_held(self) -> list[int]:
        """Returns the questions that are open, or whose lease is held."""
        return sorted({*self._open, *self._leases})

    def close(self) -> None:
        """Closes the client when the engine ends; the server then takes back the session's slots and leases."""
        self.cache.close()

    def _ask(self, question: NodeQuestion) -> None:
        if len(self._open) + len(self._leases) >= MAX_QUESTIONS:
            found = AcquiredBlocks(AcquireOutcome.OVER_LIMIT, question.ask.local)
            self._refused.append(NodeAnswer(question.number, found))
            return
        self._open[question.number] = self.cache.start_acquire(question.ask, far=question.far)

    def _describe(self) -> NodeState:
        cache = self.cache
        # This asks for more slots if they run low.
        cache.ready_slots()
        return NodeState(
            cache.memory_id,
            cache.session,
            cache.is_served,
            cache.has_room,
            cache.has_tiers,
            tuple(cache.most_slots(group) for group in range(self._groups)),
        )
