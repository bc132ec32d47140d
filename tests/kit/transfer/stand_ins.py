"""Copy engines that do what tests tell them: each passes on to another one, and changes one thing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from kvoffload.transfer import CopyDirection, CopyEngine, CopyItems, FinishedCopy
from kvoffload.transfer.copy_engine import CLOSE_TIMEOUT_S, CopyTicket, Marked, StreamPoint


class PassingEngine:
    """Changes nothing; `plans` and `waits` say what was asked of it."""

    def __init__(self, inner: CopyEngine) -> None:
        self.inner = inner
        self.plans: list[tuple[CopyDirection, CopyItems, Marked]] = []
        self.waits: list[float] = []

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        self.plans.append((direction, items, after))
        return self.inner.submit(direction, items, has_digests=has_digests, after=after)

    def mark(self, stream: int) -> StreamPoint:
        return self.inner.mark(stream)

    def poll(self) -> list[FinishedCopy]:
        return self.inner.poll()

    def fence(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.inner.fence(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.inner.close(timeout_s)


class MarkingEngine(PassingEngine):
    """Points are numbers of its own. `seen` has marks and plans in their order."""

    def __init__(self, inner: CopyEngine) -> None:
        super().__init__(inner)
        self.seen: list[str] = []
        self.marks = 0

    def mark(self, stream: int) -> StreamPoint:
        self.marks += 1
        self.seen.append(f"mark {self.marks} of {stream}")
        return f"point {self.marks}"  # type: ignore[return-value]

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        self.seen.append(f"{direction.value} after {after}")
        return super().submit(direction, items, has_digests=has_digests, after=after)


class FailingEngine(PassingEngine):
    """Half of every plan of one direction is copied when the device fails."""

    FAULT = "the device has fallen off the bus"

    def __init__(self, inner: CopyEngine, direction: CopyDirection) -> None:
        super().__init__(inner)
        self._direction = direction
        self._failing: set[CopyTicket] = set()

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        if direction is not self._direction:
            return super().submit(direction, items, has_digests=has_digests, after=after)
        half = len(items) // 2
        items = CopyItems(group=items.group[:half], block=items.block[:half], slot=items.slot[:half])
        ticket = super().submit(direction, items, has_digests=has_digests, after=after)
        self._failing.add(ticket)
        return ticket

    def poll(self) -> list[FinishedCopy]:
        return [
            FinishedCopy(ticket=one.ticket, fault=self.FAULT, digests=None) if one.ticket in self._failing else one
            for one in super().poll()
        ]


class ForgetfulEngine(PassingEngine):
    """Its loads end well and have copied nothing."""

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        if direction is CopyDirection.LOAD:
            items = CopyItems(group=items.group[:0], block=items.block[:0], slot=items.slot[:0])
        return super().submit(direction, items, has_digests=has_digests, after=after)


@dataclass(frozen=True)
class _HeldPlan:
    ticket: CopyTicket
    direction: CopyDirection
    items: CopyItems
    has_digests: bool
    after: Marked
    fails: bool = False


class HeldEngine(PassingEngine):
    """An engine that begins no submitted plan from `hold` to `release`. It numbers its tickets itself."""

    def __init__(self, inner: CopyEngine) -> None:
        super().__init__(inner)
        self._is_held = False
        self._held: deque[_HeldPlan] = deque()
        self._ended: list[FinishedCopy] = []
        self._tickets: dict[CopyTicket, CopyTicket] = {}
        self._last = 0

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        """Releases all of them, in their order."""
        self._is_held = False
        while self._held:
            plan = self._held.popleft()
            if plan.fails:
                self._ended.append(FinishedCopy(ticket=plan.ticket, fault="never begun", digests=None))
            else:
                self._pass_on(plan)

    def fail_held(self) -> None:
        """Makes the plans that are held now fail at their release, instead of beginning."""
        self._held = deque(replace(plan, fails=True) for plan in self._held)

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        self._last += 1
        plan = _HeldPlan(self._last, direction, items, has_digests, after)
        if self._is_held:
            self._held.append(plan)
        else:
            self._pass_on(plan)
        return plan.ticket

    def poll(self) -> list[FinishedCopy]:
        ended, self._ended = self._ended, []
        return ended + [replace(one, ticket=self._tickets.pop(one.ticket)) for one in super().poll()]

    def fence(self, timeout_s: float) -> bool:
        """Waits for plans that were passed on. Held plans do not end by themselves."""
        return super().fence(timeout_s) and not self._held

    def _pass_on(self, plan: _HeldPlan) -> None:
        ticket = super().submit(plan.direction, plan.items, has_digests=plan.has_digests, after=plan.after)
        self._tickets[ticket] = plan.ticket
