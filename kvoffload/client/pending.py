"""Requests on their way, and what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.cache import NO_LIMIT, AcquiredBlocks, ReservedSlots
from kvoffload.protocol import ClientMessage, Promoted, PromotionOutcome, ServerMessage

MAX_PENDING = 4096
"""Of one connection; beyond it nothing is asked."""


@dataclass(eq=False)
class Pending:
    """One request. Belongs to whoever holds the link's lock."""

    message: ClientMessage
    deadline_ns: int
    sent_ns: int
    answer: ServerMessage | None = None
    """None with `is_over`: it came too late, was lost, or could not be asked."""
    is_over: bool = False
    is_wanted: bool = True
    """Else what its answer brings is given back; whether there is one still says something of the server."""
    _on_over: Callable[[], None] | None = None

    def when_over(self, act: Callable[[], None]) -> None:
        """Calls it once: when it is over, or now if it is."""
        if self.is_over:
            act()
        else:
            self._on_over = act

    def end(self, answer: ServerMessage | None) -> None:
        if self.is_over:
            return
        self.answer = answer
        self.is_over = True
        if self._on_over is not None:
            self._on_over()


@dataclass(frozen=True)
class AcquireAsk:
    """What is asked of memory, now or when slower tiers have done what they can."""

    chain: bytes
    limit: int
    alignment: int
    shards: tuple[int, ...]
    wait_ns: int
    on_over: Callable[[], None] | None


@dataclass(frozen=True, kw_only=True)
class FarTerms:
    """How much a request would give for what lies below the server's memory."""

    wait_s: float
    token_ns: int = 0
    """What the engine takes to compute a token; 0: unknown."""


@dataclass(eq=False)
class PendingAcquire:
    """An acquire on its way. A hit is held from the moment on at which it is over."""

    local: int
    found: AcquiredBlocks | None = None
    request: Pending | None = None
    """None: nobody was asked."""
    then: AcquireAsk | None = None
    """To be asked when the request is over."""
    promotion: Pending | None = None
    """What was asked of slower tiers."""
    in_memory: int = NO_LIMIT
    """The boundary that memory alone had when they were asked."""

    @property
    def is_over(self) -> bool:
        return self.found is not None

    @property
    def came_late(self) -> bool:
        """Slower tiers had more than came in time."""
        if self.promotion is None:
            return False
        answer = self.promotion.answer
        return not isinstance(answer, Promoted) or answer.outcome in (
            PromotionOutcome.PARTLY,
            PromotionOutcome.TOO_SLOW,
        )


@dataclass(eq=False)
class PendingSlots:
    """Slots that were asked for."""

    slots: ReservedSlots
    request: Pending | None = None
    is_over: bool = False


def make_ended(message: ClientMessage, now_ns: int) -> Pending:
    """A request that is not asked."""
    ended = Pending(message=message, deadline_ns=now_ns, sent_ns=now_ns)
    ended.end(None)
    return ended


class PendingCalls:
    """By number, in the order in which they were sent."""

    def __init__(self) -> None:
        self._by_number: dict[int, Pending] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def last_number(self) -> int:
        return self._number

    def draw_number(self) -> int:
        """Of a request that somebody else waits for."""
        self._number += 1
        return self._number

    def add(self, pending: Pending) -> int:
        """Its number."""
        number = self.draw_number()
        self._by_number[number] = pending
        return number

    def take(self, number: int) -> Pending | None:
        """The request that is answered; None: it is nobody's any more."""
        return self._by_number.pop(number, None)

    def forget(self) -> None:
        """Nobody waits for any of them any more."""
        for pending in self._by_number.values():
            pending.is_wanted = False

    def expire(self, now_ns: int) -> list[Pending]:
        """Those whose deadline has passed. Answers that still come are not wanted."""
        if not self._by_number:
            return []
        late = [number for number, pending in self._by_number.items() if pending.deadline_ns <= now_ns]
        expired = [self._by_number.pop(number) for number in late]
        for pending in expired:
            pending.end(None)
        return expired

    def end_all(self) -> None:
        """The connection is gone; numbers begin anew."""
        ended = list(self._by_number.values())
        self._by_number.clear()
        self._number = 0
        for pending in ended:
            pending.end(None)

    def next_deadline_ns(self) -> int | None:
        return min((pending.deadline_ns for pending in self._by_number.values()), default=None)
