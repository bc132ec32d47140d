"""The two channels of a connection as what is sent sees them: which one a message takes, and what of it may be lost.

Pure. Between the two there is no order; what is said of blocks goes by one of them alone, and keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvoffload.client.backoff import Backoff
from kvoffload.client.breaker import Breaker
from kvoffload.client.one_way_log import OneWayLog
from kvoffload.client.pending import MAX_PENDING, Pending, PendingCalls
from kvoffload.protocol import Call, Channel, ClientMessage, Mark
from kvoffload.protocol.message import OneWay, Request


class Wire(Protocol):
    """All channels to one server. Nothing here waits, and nothing raises: what fails is False."""

    def dial(self) -> str:
        """Opens a new lifeline. Returns why there is none, in one line; empty: there is one."""
        ...

    def open_control(self, endpoint: str) -> None:
        """A new control connection to the server that was dialled."""
        ...

    def send_lifeline(self, call: Call, descriptors: tuple[int, ...]) -> bool: ...

    def send_control(self, call: Call) -> bool: ...

    def open_express(self, descriptor: int) -> None:
        """The process's end of an express channel. Takes the descriptor."""
        ...

    def send_express(self, call: Call) -> bool: ...

    def hang_up(self) -> None:
        """All channels. What was not sent yet is lost."""
        ...


class Lane:
    """One channel: what was sent on it, and whether it is answered."""

    def __init__(self, send: Callable[[Call], bool], backoff: Backoff) -> None:
        self.send = send
        self.pending = PendingCalls()
        self.breaker = Breaker(backoff)
        self.one_way = 0
        """One-way messages sent on this connection."""
        self.log = OneWayLog()
        self._backoff = backoff
        self._mark: Pending | None = None

    @property
    def has_mark(self) -> bool:
        """The answer to one is awaited."""
        return self._mark is not None and not self._mark.is_over

    @property
    def needs_mark(self) -> bool:
        """Whether a request should follow what was sent, and none does yet."""
        return self.log.needs_mark and not self.has_mark

    def ask(self, message: Request, session: int, now_ns: int, wait_ns: int) -> Pending:
        """It is over at once if it cannot be sent."""
        pending = Pending(message=message, deadline_ns=now_ns + wait_ns, sent_ns=now_ns)
        if len(self.pending) >= MAX_PENDING:
            pending.end(None)
            return pending
        number = self.pending.add(pending)
        is_sent = False
        try:
            is_sent = self.send(Call(message, number, session, pending.deadline_ns))
        finally:
            if not is_sent:
                self.pending.take(number)
        if not is_sent:
            self.breaker.on_late(now_ns)
            pending.end(None)
        return pending

    def mark(self, session: int, now_ns: int, wait_ns: int) -> Pending:
        """Its answer shows that the server lives, and that it had what was sent before."""
        self._mark = self.ask(Mark(), session, now_ns, wait_ns)
        return self._mark

    def tell(self, message: OneWay, session: int) -> bool:
        """A message that is in the log. False: it is not sent, and the next one would show a hole."""
        self.one_way += 1
        return self.send(Call(message, self.one_way, session, 0))

    def hear(self, number: int) -> Pending | None:
        """The request that is answered; None: it is nobody's any more."""
        self.log.confirm(number)
        return self.pending.take(number)

    def expire(self, now_ns: int) -> None:
        if self.pending.expire(now_ns):
            self.breaker.on_late(now_ns)

    def reset(self) -> None:
        """The connection is gone: counts begin anew. What was sent on it is still in the log."""
        self.one_way = 0
        self._mark = None
        self._backoff.reset()
        self.breaker = Breaker(self._backoff)
        self.pending.end_all()


class Lanes:
    """Both. A process without blocks has no use for the express channel, and gets none."""

    def __init__(self, wire: Wire, make_backoff: Callable[[], Backoff], *, has_blocks: bool) -> None:
        self.control = Lane(wire.send_control, make_backoff())
        self.express = Lane(wire.send_express, make_backoff())
        self.main = self.express if has_blocks else self.control
        """The one whose answers say whether the process is served."""

    def __iter__(self) -> Iterator[Lane]:
        return iter((self.control, self.express))

    @property
    def next_deadline_ns(self) -> int | None:
        deadlines = [lane.pending.next_deadline_ns() for lane in self]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def choose(self, message: ClientMessage) -> Lane:
        """The one that the message takes."""
        return self.control if Channel.CONTROL in message.channels else self.express

    def reset(self) -> None:
        """The connection is gone."""
        for lane in self:
            lane.reset()

    def take_all(self) -> list[OneWay]:
        """What nobody knows of whether the server has had it, to be sent once more in this order."""
        return [message for lane in self for message in lane.log.take_all()]
