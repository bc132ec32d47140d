"""The control and the express channel, seen from the sender: which one a message takes, and which messages may be lost.

Pure. There is no order between the two. All messages about blocks take one of them, so they keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvoffload.protocol import Call, Channel, ClientMessage, Mark, ServerMessage
from kvoffload.protocol.message import OneWay, Request

MAX_PENDING = 4096
"""The most requests that one connection has under way. At this bound, new requests end at once without an answer."""
MAX_MESSAGES = 1024
"""The most one-way messages in a log."""
MARK_AFTER = 256
"""Number of messages in a log from which on a mark is sent: a request whose answer empties the log."""
_SPREAD = 0.25
SILENT_NS = 250_000_000
"""How long a server must have answered nothing, while an answer is late, before it counts as hanging. A server whose
quota of processors is used up stands still for less."""
LOOK_NS = 20_000_000
"""How often a process looks for answers at least, as long as it gets its share of the processors itself."""


@dataclass(eq=False)
class Pending:
    """A request that was sent, and its answer once it has arrived. The caller holds the link's lock."""

    message: ClientMessage
    deadline_ns: int
    sent_ns: int
    answer: ServerMessage | None = None
    """None with `is_over`: the answer came too late, was lost, or the request could not be sent."""
    is_over: bool = False
    is_wanted: bool = True
    """False: the link gives back what the answer brings. That one arrives still shows that the server answers."""
    _on_over: tuple[Callable[[], None], ...] = ()

    def when_over(self, act: Callable[[], None]) -> None:
        """Calls `act` once: when the request is over and the acts before it are done, or now if it is over already."""
        if self.is_over:
            act()
        else:
            self._on_over = (*self._on_over, act)

    def end(self, answer: ServerMessage | None) -> None:
        if self.is_over:
            return
        self.answer = answer
        self.is_over = True
        for act in self._on_over:
            act()


def make_ended(message: ClientMessage, now_ns: int) -> Pending:
    """Returns a request that is over at once and is never sent."""
    ended = Pending(message=message, deadline_ns=now_ns, sent_ns=now_ns)
    ended.end(None)
    return ended


class PendingCalls:
    """Requests on their way: by number, in the order in which they were sent."""

    def __init__(self) -> None:
        self._by_number: dict[int, Pending] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def last_number(self) -> int:
        return self._number

    def draw_number(self) -> int:
        """Returns the next number, for a request that is not kept here: its sender waits for the answer."""
        self._number += 1
        return self._number

    def add(self, pending: Pending) -> int:
        """Returns the number that the request has from now on."""
        number = self.draw_number()
        self._by_number[number] = pending
        return number

    def take(self, number: int) -> Pending | None:
        """Removes and returns the request with this number. None: it has expired, or was never here."""
        return self._by_number.pop(number, None)

    def forget(self) -> None:
        """Marks all requests as not wanted: their callers do not wait any more."""
        for pending in self._by_number.values():
            pending.is_wanted = False

    def postpone(self, looked_ns: int, now_ns: int) -> None:
        """Leaves out of all deadlines the time since `looked_ns` in which this process should have looked for answers
        and could not. Whatever held it up may have held up the server on the same machine."""
        for pending in self._by_number.values():
            held_up_ns = now_ns - max(looked_ns, pending.sent_ns) - LOOK_NS
            pending.deadline_ns += max(held_up_ns, 0)

    def expire(self, now_ns: int) -> list[Pending]:
        """Ends and returns the requests whose deadline has passed. Answers that come later are given back."""
        if not self._by_number:
            return []
        late = [number for number, pending in self._by_number.items() if pending.deadline_ns <= now_ns]
        expired = [self._by_number.pop(number) for number in late]
        for pending in expired:
            pending.end(None)
        return expired

    def end_all(self) -> None:
        """Ends all requests, since the connection is gone. Numbers start again at 1."""
        ended = list(self._by_number.values())
        self._by_number.clear()
        self._number = 0
        for pending in ended:
            pending.end(None)

    def next_deadline_ns(self) -> int | None:
        return min((pending.deadline_ns for pending in self._by_number.values()), default=None)


class Backoff:
    """The wait before the next attempt.

    It doubles from `first_ns` to `last_ns`, varied by a quarter so that many processes do not come at once.
    """

    def __init__(self, first_ns: int, last_ns: int, random: Random) -> None:
        self._first_ns = first_ns
        self._last_ns = last_ns
        self._random = random
        self._wait_ns = first_ns

    def next_ns(self) -> int:
        """Returns the wait before the next attempt, in nanoseconds."""
        wait_ns = self._wait_ns
        self._wait_ns = min(2 * wait_ns, self._last_ns)
        return int(wait_ns * self._random.uniform(1 - _SPREAD, 1 + _SPREAD))

    def reset(self) -> None:
        """Starts again with the shortest wait, after an attempt that succeeded."""
        self._wait_ns = self._first_ns


class Breaker:
    """Tracks whether a server that is there also answers.

    closed ──an answer is late──► doubting ──no answer at all for `SILENT_NS`──► open
      ▲                              │                                            │
      └──────────any answer──────────┴─────────────────any answer─────────────────┘

    While it doubts or is open, a probe asks now and then whether the server answers. While it is open no request of a
    caller is sent, so that none waits a second time for a server that hangs. A server that is only slow costs the
    requests whose answers are late, and no others.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._probe_ns = 0
        self._heard_ns = 0
        self.is_open = False
        self.opened_ns = 0
        self.silent_since_ns: int | None = None
        """Since when no answer has come, although one was due; None: the answers come in time."""

    @property
    def opens_ns(self) -> int | None:
        """When it opens if no answer comes; None: it is open, or does not doubt."""
        return None if self.is_open or self.silent_since_ns is None else self.silent_since_ns + SILENT_NS

    def on_answer(self, now_ns: int) -> None:
        self._heard_ns = now_ns
        if self.silent_since_ns is not None:
            self.is_open, self.silent_since_ns = False, None
            self._backoff.reset()

    def on_late(self, sent_ns: int, now_ns: int) -> None:
        """The answer to a request sent at `sent_ns` did not come in time."""
        if self.silent_since_ns is None:
            self.silent_since_ns = max(sent_ns, self._heard_ns)
            self._probe_ns = now_ns
        self.on_time(now_ns)

    def on_unsent(self, now_ns: int) -> None:
        """The server does not take what is sent, so it opens at once."""
        if not self.is_open:
            self.is_open, self.opened_ns = True, now_ns
            if self.silent_since_ns is None:
                self.silent_since_ns = now_ns
                self._probe_ns = now_ns + self._backoff.next_ns()

    def postpone(self, held_up_ns: int) -> None:
        """Leaves out a time in which this process could not look for answers."""
        if self.silent_since_ns is not None:
            self.silent_since_ns += held_up_ns

    def on_time(self, now_ns: int) -> None:
        """Opens if the server has been silent for too long."""
        opens_ns = self.opens_ns
        if opens_ns is not None and now_ns >= opens_ns:
            self.is_open, self.opened_ns = True, now_ns

    def take_probe(self, now_ns: int) -> bool:
        """Whether a probe is due; if so, sets the time of the next one. A probe asks whether the server answers
        again."""
        if self.silent_since_ns is None or now_ns < self._probe_ns:
            return False
        self._probe_ns = now_ns + self._backoff.next_ns()
        return True


class OneWayLog:
    """One-way messages that the server may not have received yet.

    A server serves a connection's messages in order. So an answer to a request says that all one-way messages sent
    before it were served. When a connection is lost, the remaining messages are sent again on the next one. Serving
    one twice does no harm: tickets and leases are void once they were used. At the log's bound the oldest message is
    forgotten: slots or leases that it gives back stay the session's until the engine ends.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[int, OneWay]] = deque()
        """Each message, with the number of the last request that was sent before it."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def needs_mark(self) -> bool:
        """A request should follow, for its answer."""
        return len(self._entries) >= MARK_AFTER

    def add(self, message: OneWay, last_request: int) -> None:
        if len(self._entries) >= MAX_MESSAGES:
            self._entries.popleft()
        self._entries.append((last_request, message))

    def confirm(self, answered: int) -> None:
        """Drops the messages that were sent before the request with this number, which was answered."""
        while self._entries and self._entries[0][0] < answered:
            self._entries.popleft()

    def take_all(self) -> list[OneWay]:
        """Removes and returns all messages, in the order in which to send them again."""
        messages = [message for _, message in self._entries]
        self._entries.clear()
        return messages


class Wire(Protocol):
    """All channels to one server. No method waits or raises; a send that fails returns False."""

    def dial(self) -> str:
        """Opens a new lifeline. Returns why there is none, in one line; empty: there is one."""
        ...

    def open_control(self, endpoint: str) -> None:
        """Opens a new control connection to the server that was dialled."""
        ...

    def send_lifeline(self, call: Call, descriptors: tuple[int, ...]) -> bool: ...

    def send_control(self, call: Call) -> bool: ...

    def open_express(self, descriptor: int) -> None:
        """Starts to use the process's end of an express channel. Takes the descriptor."""
        ...

    def send_express(self, call: Call) -> bool: ...

    def hang_up(self) -> None:
        """Closes all channels. Data that was not sent yet is lost."""
        ...


class Lane:
    """The requests and one-way messages sent on one channel, and whether they are answered."""

    def __init__(self, send: Callable[[Call], bool], backoff: Backoff) -> None:
        self.send = send
        self.pending = PendingCalls()
        self.breaker = Breaker(backoff)
        self.one_way = 0
        """One-way messages sent on this connection."""
        self.log = OneWayLog()
        self._backoff = backoff
        self._mark: Pending | None = None
        self._looked_ns = 0

    @property
    def has_mark(self) -> bool:
        """Whether the answer to a mark is awaited."""
        return self._mark is not None and not self._mark.is_over

    @property
    def needs_mark(self) -> bool:
        """Whether the log is long enough for a mark, and none is under way."""
        return self.log.needs_mark and not self.has_mark

    def ask(self, message: Request, session: int, now_ns: int, wait_ns: int) -> Pending:
        """Sends a request. It is over at once if it cannot be sent."""
        pending = Pending(message=message, deadline_ns=now_ns + wait_ns, sent_ns=now_ns)
        if len(self.pending) >= MAX_PENDING:
            pending.end(None)
            return pending
        number = self.pending.add(pending)
        is_sent = False
        try:
            # A late answer is of use, too: it shows that the server lives, and the deadline may be postponed.
            is_sent = self.send(Call(message, number, session, pending.deadline_ns + SILENT_NS))
        finally:
            if not is_sent:
                self.pending.take(number)
        if not is_sent:
            self.breaker.on_unsent(now_ns)
            pending.end(None)
        return pending

    def mark(self, session: int, now_ns: int, wait_ns: int) -> Pending:
        """Sends a request whose answer shows that the server lives, and that it received what was sent before."""
        self._mark = self.ask(Mark(), session, now_ns, wait_ns)
        return self._mark

    def tell(self, message: OneWay, session: int) -> bool:
        """Sends a message that is in the log. False: it is not sent, and the next number would show a gap."""
        self.one_way += 1
        return self.send(Call(message, self.one_way, session, 0))

    def hear(self, number: int) -> Pending | None:
        """Notes an answer and returns its request. None: the request has expired."""
        self.log.confirm(number)
        return self.pending.take(number)

    def expire(self, now_ns: int) -> None:
        """Ends the requests whose answers are late."""
        if now_ns - self._looked_ns > LOOK_NS:
            self.pending.postpone(self._looked_ns, now_ns)
            self.breaker.postpone(now_ns - self._looked_ns - LOOK_NS)
        self._looked_ns = now_ns
        expired = self.pending.expire(now_ns)
        if expired:
            self.breaker.on_late(min(one.sent_ns for one in expired), now_ns)
        else:
            self.breaker.on_time(now_ns)

    def reset(self) -> None:
        """Starts all counts again at 0, since the connection is gone. The log keeps its messages."""
        self.one_way = 0
        self._mark = None
        self._backoff.reset()
        self.breaker = Breaker(self._backoff)
        self.pending.end_all()


class Lanes:
    """The lanes of both channels. A process without blocks has no use for the express channel, and gets none."""

    def __init__(self, wire: Wire, make_backoff: Callable[[], Backoff], *, has_blocks: bool) -> None:
        self.control = Lane(wire.send_control, make_backoff())
        self.express = Lane(wire.send_express, make_backoff())
        self.main = self.express if has_blocks else self.control
        """The lane whose answers show whether the process is served."""

    def __iter__(self) -> Iterator[Lane]:
        return iter((self.control, self.express))

    @property
    def awaits_answers(self) -> bool:
        return any(len(lane.pending) for lane in self)

    @property
    def awaits_control(self) -> bool:
        """Whether a request on the control channel awaits its answer."""
        return len(self.control.pending) > 0

    @property
    def next_deadline_ns(self) -> int | None:
        deadlines = [lane.pending.next_deadline_ns() for lane in self] + [lane.breaker.opens_ns for lane in self]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def choose(self, message: ClientMessage) -> Lane:
        """Returns the lane that the message takes."""
        return self.control if Channel.CONTROL in message.channels else self.express

    def reset(self) -> None:
        """Resets both lanes, since the connection is gone."""
        for lane in self:
            lane.reset()

    def forget(self) -> None:
        """Marks all requests as not wanted. Leases and slots that their answers bring are given back."""
        for lane in self:
            lane.pending.forget()

    def take_all(self) -> list[OneWay]:
        """Removes and returns the messages that the server may not have received, in the order in which to send them
        again."""
        return [message for lane in self for message in lane.log.take_all()]
