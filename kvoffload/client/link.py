"""The state machine of a process and its server: takes what arrives, with its time, and sends messages.

DOWN ──dial──► JOINING ──joined──► SERVING
  ▲               │                   │
  └──back-off─────┴─────hang-up───────┘     hang-up: the lifeline ends, the server has changed, or it lost the thread

Pure: no socket, no clock, no thread. Used by one thread, or under the client's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvoffload.client.inventory import Heard, Inventory
from kvoffload.client.joining import Joining, Member, OnLifeline, Step, ToSend
from kvoffload.client.lanes import Backoff, Lane, Lanes, Pending, Wire, make_ended
from kvoffload.client.memories import Memories
from kvoffload.client.settings import LinkSettings, LinkState
from kvoffload.packets import close_all
from kvoffload.protocol import (
    Abort,
    Acquired,
    Answer,
    Call,
    Closing,
    CreditsGranted,
    Error,
    ErrorCode,
    EventsLost,
    Express,
    FormerMemory,
    Greeting,
    Holding,
    ListBlocks,
    NamespaceOpened,
    Quarantine,
    Register,
    Registered,
    Release,
    Retire,
    Subscribe,
    Subscribed,
    Warned,
)
from kvoffload.protocol.limits import MAX_FORMER
from kvoffload.protocol.message import ONE_WAY_OPS, Event, OneWay, Request

logger = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000
MOST_LINES = 100
"""The most warnings of one server that are logged. Later ones are counted, and stand in the server's own log."""
SUBSCRIBE_PAUSE_NS = SECOND_NS
"""Least time after a refusal before the link asks for events again."""
_IDLE_NS = SECOND_NS // 4
_LOST_THREAD = (ErrorCode.NO_SESSION, ErrorCode.NOT_GREETED, ErrorCode.NOT_REGISTERED, ErrorCode.OUT_OF_ORDER)


@dataclass(eq=False)
class _Visit:
    """The state of one connection to a server, from the dial to the hang-up."""

    joining: Joining | None = None
    """The attempt to join, or None once it has succeeded."""
    join_by_ns: int = 0
    session: int = 0
    """The session's number; 0: the server has not sent its welcome yet."""
    capabilities: tuple[str, ...] = ()
    told: int = 0
    """Number of one-way messages sent on the lifeline."""
    told_held: tuple[tuple[int, int], ...] | None = None
    """The memories, with their bytes, that the server knows this process still maps. None: it was not told yet."""
    subscribing: Pending | None = None
    """The request for events that the server has not answered yet, or None."""
    is_subscribed: bool = False
    subscribe_ns: int = 0
    """Time before which events are not asked for again; 0: the server has not refused."""


class Link:
    """Keeps a process served: joins, asks, notices a lost server, and joins again until it is closed."""

    def __init__(
        self,
        member: Member,
        register: Register | None,
        settings: LinkSettings,
        wire: Wire,
        memories: Memories,
        *,
        pidfd: int,
        random: Random,
        on_event: Callable[[Heard, int], None] | None = None,
    ) -> None:
        """`on_event` hears of the events of a subscription, with their numbers, and of its inventory. The pidfd stays
        the caller's."""
        self._member = member
        self._register = register
        self._settings = settings
        self._wire = wire
        self._pidfd = pidfd
        self._random = random
        self._on_event = on_event
        self.memories = memories
        self.warnings = ServerWarnings()
        self.state = LinkState.DOWN
        self.fault = ""
        """The reason why the process is not served, in one line."""
        self.refusal: Error | None = None
        """The server's refusal, or None if there was none."""
        self.registered: Registered | None = None
        """The answer to the registration. Its namespace stays valid, with or without a server, while the memory is the
        same."""
        self.boot_id = 0
        self.is_closing = False
        """Whether the server is ending and waits until this process gives back what it holds."""
        self.tenants: dict[str, int] = {}
        """The tenants that this process may charge, by name, with the server's number of each."""
        self.joins = 0
        self.sessions = 0
        """Number of joins that did not continue the session before. Slots of an earlier session are void."""
        self._visit = _Visit()
        self._dial_ns = 0
        self._redial = self._make_backoff()
        self.lanes = Lanes(wire, self._make_backoff, has_blocks=register is not None)
        self._subscription: Subscribe | None = None
        self._inventory: Inventory | None = None

    @property
    def is_serving(self) -> bool:
        """It is joined, and what it asks is answered in time."""
        return self.state is LinkState.SERVING and not self.lanes.main.breaker.is_open

    def has(self, capability: str) -> bool:
        """The server that it is served by has it, and this process may use it."""
        return self.state is LinkState.SERVING and capability in self._visit.capabilities

    @property
    def awaits_answers(self) -> bool:
        return self.state is LinkState.JOINING or any(len(lane.pending) for lane in self.lanes)

    @property
    def awaits_control(self) -> bool:
        """Whether a request on the control channel awaits its answer."""
        return len(self.lanes.control.pending) > 0

    @property
    def hears_events(self) -> bool:
        """Whether events may come on the control channel, for which no caller waits."""
        return self.state is LinkState.SERVING and self._on_event is not None

    @property
    def one_way_count(self) -> int:
        """One-way messages sent on the control channel."""
        return self.lanes.control.one_way

    # ---- what comes in ----

    def on_time(self, now_ns: int) -> None:
        """Does what is due. The caller calls it at `next_ns` at the latest."""
        visit = self._visit
        if self.is_dial_due(now_ns):
            self._dial(now_ns)
        elif visit.joining is not None and visit.joining.step is not Step.MEMORY and now_ns >= visit.join_by_ns:
            self._hang_up(now_ns, f"the server does not answer: awaited is its {visit.joining.step.value}")
        elif self.state is LinkState.SERVING:
            self._watch_answers(now_ns)
            self._go_on_subscription(now_ns)
            self._go_on_inventory(now_ns)
            if self.state is LinkState.SERVING and visit.told_held:
                self._tell_held(visit.capabilities, self.memories.list_mapped(), now_ns)

    def is_dial_due(self, now_ns: int) -> bool:
        return self.state is LinkState.DOWN and now_ns >= self._dial_ns

    def cannot_dial(self, now_ns: int, line: str) -> None:
        """Notes that no server can be found, with the reason."""
        if self.state is LinkState.DOWN:
            self._dial_ns = now_ns + self._redial.next_ns()
            if line != self.fault:
                logger.warning("not served by a cache server: %s", line)
            self.fault = line

    def next_ns(self, now_ns: int) -> int:
        """Returns when `on_time` has to be called again."""
        at_ns = now_ns + _IDLE_NS
        if self.state is LinkState.DOWN:
            at_ns = min(at_ns, self._dial_ns)
        elif self._visit.joining is not None and self._visit.joining.step is not Step.MEMORY:
            at_ns = min(at_ns, self._visit.join_by_ns)
        deadline_ns = self.lanes.next_deadline_ns
        return at_ns if deadline_ns is None else min(at_ns, deadline_ns)

    def on_lifeline(self, answer: Answer, descriptors: list[int], now_ns: int) -> None:
        """Hears a message of the lifeline, and takes its descriptors."""
        message, joining = answer.message, self._visit.joining
        if joining is not None and not isinstance(message, Warned | Quarantine | Closing | Retire):
            if isinstance(message, Express) and joining.awaits_express and len(descriptors) == 1:
                self._wire.open_express(descriptors[0])
                joining.on_express()
                self._go_on(joining, [], now_ns)
            else:
                self._go_on(joining, joining.on_lifeline(answer, descriptors), now_ns)
            return
        close_all(descriptors)
        if isinstance(message, Warned):
            self.warnings.hear(message, answer.boot_id)
        elif isinstance(message, Quarantine):
            self._hang_up(now_ns, message.message)
        elif isinstance(message, Closing):
            # Of one that joins, too: what is held can be given back once it is joined.
            self.is_closing = True
            logger.info("the cache server ends: %s", message.reason.name.lower())
        elif isinstance(message, Retire) and joining is None:
            for memory_id in np.frombuffer(message.memories, "<u8").tolist():
                self.memories.retire_unused(memory_id)

    def on_control(self, answer: Answer, now_ns: int) -> None:
        joining = self._visit.joining
        if joining is not None:
            self._go_on(joining, joining.on_control(answer), now_ns)
            return
        self._on_answer(self.lanes.control, answer, now_ns)

    def on_express(self, answer: Answer, now_ns: int) -> None:
        self._on_answer(self.lanes.express, answer, now_ns)

    def on_hang_up(self, now_ns: int, line: str) -> None:
        """Hears that a channel has ended, or that a message on it could not be decoded."""
        if self.state in (LinkState.JOINING, LinkState.SERVING):
            self._hang_up(now_ns, line)

    def _on_answer(self, lane: Lane, answer: Answer, now_ns: int) -> None:
        if self.state is not LinkState.SERVING:
            return
        if answer.boot_id != self.boot_id:
            self._hang_up(now_ns, "another server answers")
            return
        lane.breaker.on_answer()
        if isinstance(answer.message, Event):
            if self._on_event is not None:
                self._on_event(answer.message, answer.number)
            if isinstance(answer.message, EventsLost):
                self.begin_inventory(now_ns)
            return
        if isinstance(answer.message, Error) and self._has_lost_thread(answer.message, now_ns):
            return
        pending = lane.hear(answer.number)
        if pending is None or not pending.is_wanted:
            self._give_back(answer, now_ns)
        if pending is not None:
            pending.end(answer.message if pending.is_wanted else None)
            if isinstance(pending.message, ListBlocks):
                self._go_on_inventory(now_ns)
            elif isinstance(pending.message, Subscribe):
                self._go_on_subscription(now_ns)

    # ---- what is asked ----

    def ask(self, message: Request, now_ns: int, wait_ns: int) -> Pending:
        """Sends a request. It is over at once if it cannot be sent; see `is_serving`."""
        if self.state is LinkState.SERVING:
            return self.lanes.choose(message).ask(message, self._visit.session, now_ns, wait_ns)
        return make_ended(message, now_ns)

    def tell(self, message: OneWay, now_ns: int) -> None:
        """Sends a one-way message. One that cannot be sent now is sent when the session goes on, or dropped if it has
        no effect any more."""
        if self.state is LinkState.CLOSED:
            return
        lane = self.lanes.choose(message)
        lane.log.add(message, lane.pending.last_number)
        if self.state is not LinkState.SERVING:
            return
        if not lane.tell(message, self._visit.session):
            self._hang_up(now_ns, "the server does not read, or is gone")
        elif lane.needs_mark:
            lane.mark(self._visit.session, now_ns, self._call_ns)

    def forget_requests(self) -> None:
        """Marks all requests as not wanted. Leases and slots that their answers bring are given back."""
        for lane in self.lanes:
            lane.pending.forget()

    def confirm(self, now_ns: int, wait_ns: int) -> Pending | None:
        """Returns a request that is over when the server has received every message about blocks. None: it has
        already."""
        lane = self.lanes.main
        if self.state is not LinkState.SERVING or not (lane.pending or lane.log):
            return None
        return lane.mark(self._visit.session, now_ns, wait_ns)

    def subscribe(self, message: Subscribe, now_ns: int, *, with_inventory: bool = False) -> None:
        """Asks for events now and after every join, and again for as long as the server refuses. `EventsLost(count=0)`
        shows that events may have been missed. With an inventory, which follows and is repeated after every loss, of
        the namespaces that are named or else of the process's own one."""
        assert self._on_event is not None, "no receiver of events was given"
        self._inventory = Inventory(self._on_event) if with_inventory else None
        self._subscription = message
        if self.state is LinkState.SERVING:
            self._subscribe(now_ns)

    def begin_inventory(self, now_ns: int) -> bool:
        """Starts the subscription's inventory from its beginning, once the server tells events. False: there is no
        inventory."""
        if self._inventory is None or self._subscription is None or not self.has("inventory"):
            return False
        if not self._visit.is_subscribed:
            return True
        name_spaces = self._subscription.name_spaces
        if not name_spaces and self.registered is not None and self._register is not None:
            name_spaces = (self.registered.name_space,)
            opened = NamespaceOpened(name_space=self.registered.name_space, fingerprint=self._register.fingerprint)
            if self._on_event is not None:
                self._on_event(opened, 0)
        if not name_spaces:
            return False
        self._inventory.begin(name_spaces)
        self._go_on_inventory(now_ns)
        return True

    def close(self) -> None:
        self._leave()
        self.state = LinkState.CLOSED
        self.lanes.reset()
        self._wire.hang_up()

    # ---- joining ----

    def _dial(self, now_ns: int) -> None:
        line = self._wire.dial()
        if line:
            self._dial_ns = now_ns + self._redial.next_ns()
            self.fault = line
            return
        former = self.memories.current
        joining = Joining(
            self._member,
            self._register,
            former=None if former is None else former.held,
        )
        self.state = LinkState.JOINING
        self._visit = _Visit(joining)
        self._go_on(joining, joining.start(self._pidfd), now_ns)

    def _go_on(self, joining: Joining, messages: list[ToSend], now_ns: int) -> None:
        self._visit.join_by_ns = now_ns + int(self._settings.join_deadline_s * SECOND_NS)
        if joining.step is Step.FAILED:
            self.refusal = joining.refusal
            self._hang_up(now_ns, joining.fault)
            return
        for one in messages:
            if not self._send(joining, one):
                self._hang_up(now_ns, "the server does not read, or is gone")
                return
        if joining.accepted is not None and self._visit.told_held is None and self.memories.current is not None:
            # Before the server takes memory of its own, if it is not too late.
            held = self.memories.list_mapped(is_current_former=True)
            self._tell_held(joining.accepted.capabilities, held, now_ns)
        if self.state is LinkState.JOINING and joining.step is Step.JOINED:
            self._start_serving(joining, now_ns)

    def _send(self, joining: Joining, one: ToSend) -> bool:
        """Sends on fresh connections: lifeline and control are numbered from 1 on."""
        visit = self._visit
        if isinstance(one, OnLifeline):
            visit.told += isinstance(one.message, OneWay)
            # By the time of the greeting the server knows whether its clock is this process's.
            expires_ns = visit.join_by_ns if isinstance(one.message, Greeting) else 0
            return self._wire.send_lifeline(Call(one.message, max(visit.told, 1), 0, expires_ns), one.descriptors)
        assert joining.welcome is not None
        if not visit.session:
            visit.session = joining.welcome.session
            self._wire.open_control(joining.welcome.control)
        return self._wire.send_control(
            Call(one.message, self.lanes.control.pending.draw_number(), self._visit.session, 0)
        )

    def _tell_held(self, capabilities: tuple[str, ...], held: tuple[tuple[int, int], ...], now_ns: int) -> None:
        """Sends the server a list of memories that this process still maps, so that it does not grow beyond what its
        engines have let go of. Sends nothing if the server knows already."""
        visit = self._visit
        if "former" not in capabilities or held == visit.told_held:
            return
        visit.told_held = held
        rows = tuple(FormerMemory(memory=memory_id, size_bytes=size_bytes) for memory_id, size_bytes in held)
        visit.told += 1
        if not self._wire.send_lifeline(Call(Holding(memories=rows[:MAX_FORMER]), visit.told, 0, 0), ()):
            self._hang_up(now_ns, "the server does not read, or is gone")

    def _start_serving(self, joining: Joining, now_ns: int) -> None:
        former = self.memories.current
        former_session = -1 if former is None else former.held.memory_session
        try:
            held = joining.take_memory()
            is_new = held is not None and self.memories.take(held)
        except (OSError, RuntimeError, ValueError) as fault:
            self._hang_up(now_ns, f"the server's memory cannot be mapped: {fault}")
            return
        # The session in the welcome does not count here: it may have been sent before an adoption.
        goes_on = held is not None and not is_new and held.memory_session == former_session
        self.boot_id = joining.boot_id
        self.registered = joining.registered
        self.state = LinkState.SERVING
        self.fault = ""
        self.refusal = None
        self._visit.capabilities = () if joining.accepted is None else joining.accepted.capabilities
        self.joins += 1
        self.sessions += not goes_on
        self._visit.joining = None
        self._redial.reset()
        again = self.lanes.take_all()
        # In a new session of the same memory these are void, except for leases and slots that others of the engine were
        # given there.
        for message in () if is_new else again:
            self.tell(message, now_ns)
        logger.info("served by cache server %x, session %x", self.boot_id, self._visit.session)
        if self.registered is not None and self.memories.current is not None:
            self.memories.mapped = self.memories.current, self.registered.name_space
            self.tenants = {name: place for place, name in enumerate(self.registered.tenants, 1)}
        if self._subscription is not None:
            if self._on_event is not None and self.joins > 1:
                self._on_event(EventsLost(count=0), 0)
            self._subscribe(now_ns)
        if held is not None and self.state is LinkState.SERVING:
            self._visit.told_held = None
            self._tell_held(self._visit.capabilities, self.memories.list_mapped(), now_ns)

    # ---- being served ----

    def _subscribe(self, now_ns: int) -> None:
        assert self._subscription is not None
        self._visit.is_subscribed = False
        self._visit.subscribing = self.ask(self._subscription, now_ns, self._call_ns)

    def _go_on_subscription(self, now_ns: int) -> None:
        """Handles the answer to a subscription. The inventory begins only once the server tells events: without them it
        would soon be wrong without notice."""
        visit, asked = self._visit, self._visit.subscribing
        if asked is None:
            if visit.subscribe_ns and not visit.is_subscribed and now_ns >= visit.subscribe_ns:
                self._subscribe(now_ns)
            return
        if not asked.is_over or self.state is not LinkState.SERVING:
            return
        visit.subscribing = None
        if not isinstance(asked.answer, Subscribed):
            refusal = asked.answer if isinstance(asked.answer, Error) else None
            if not visit.subscribe_ns:
                line = "there was no answer" if refusal is None else refusal.message
                logger.warning("the cache server tells no events and is asked again: %s", line)
            pause_ns = 0 if refusal is None else refusal.retry_after_ms * 1_000_000
            visit.subscribe_ns = now_ns + max(pause_ns, SUBSCRIBE_PAUSE_NS)
            return
        visit.is_subscribed = True
        if visit.subscribe_ns and self._on_event is not None:
            self._on_event(EventsLost(count=0), 0)
        self.begin_inventory(now_ns)

    def _go_on_inventory(self, now_ns: int) -> None:
        if self._inventory is not None and self.state is LinkState.SERVING:
            self._inventory.go_on(now_ns, lambda message: self.ask(message, now_ns, self._call_ns))

    def _watch_answers(self, now_ns: int) -> None:
        for lane in self.lanes:
            lane.expire(now_ns)
            breaker = lane.breaker
            if not breaker.is_open:
                continue
            if now_ns - breaker.opened_ns >= int(self._settings.rejoin_after_s * SECOND_NS):
                self._hang_up(now_ns, "the server has not answered for long")
                return
            if breaker.take_probe(now_ns):
                lane.mark(self._visit.session, now_ns, self._call_ns)

    def _has_lost_thread(self, error: Error, now_ns: int) -> bool:
        """Whether the error leaves nothing to answer: the server does not know this connection or session any more, and
        the link hangs up, or the error is about a one-way message, and is logged."""
        if error.code in _LOST_THREAD:
            self._hang_up(now_ns, error.message)
            return True
        if error.about_op in ONE_WAY_OPS:
            logger.warning("the cache server refused: %s", error.message)
            return True
        return False

    def _give_back(self, answer: Answer, now_ns: int) -> None:
        """Gives back the lease or the slots of an answer for which no caller waits any more."""
        message = answer.message
        if isinstance(message, Acquired) and message.lease:
            self.tell(Release(leases=message.lease.to_bytes(8, "little")), now_ns)
        elif isinstance(message, CreditsGranted) and message.tickets:
            self.tell(Abort(tickets=message.tickets), now_ns)

    def _hang_up(self, now_ns: int, line: str) -> None:
        self._leave()
        if self.state is LinkState.SERVING or line != self.fault:
            logger.warning("not served by a cache server: %s", line)
        self.fault = line
        self._wire.hang_up()
        self.state = LinkState.DOWN
        self._dial_ns = now_ns + self._redial.next_ns()
        self.lanes.reset()
        self.is_closing = False

    def _leave(self) -> None:
        """Ends the visit: stops the inventory, and closes descriptors that the server has begun to hand over."""
        if self._inventory is not None:
            self._inventory.stop()
        if self._visit.joining is not None:
            self._visit.joining.close()
        self._visit = _Visit()

    @property
    def _call_ns(self) -> int:
        return int(self._settings.call_deadline_s * SECOND_NS)

    def _make_backoff(self) -> Backoff:
        settings = self._settings
        return Backoff(
            int(settings.first_backoff_s * SECOND_NS), int(settings.last_backoff_s * SECOND_NS), self._random
        )


class ServerWarnings:
    """Writes the warnings of a cache server into the log of the process that it serves.

    The caller holds the client's lock. A server repeats its last warnings to a process that joins it again.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of warnings heard, from all servers."""
        self._boot_id = 0
        self._last = 0

    def hear(self, warned: Warned, boot_id: int) -> None:
        """Logs a warning if it is new."""
        if boot_id != self._boot_id:
            self._boot_id, self._last = boot_id, 0
        if warned.number <= self._last:
            return
        self._last = warned.number
        self.count += 1
        if warned.number < MOST_LINES:
            logger.warning("the cache server warns: %s", warned.message)
        elif warned.number == MOST_LINES:
            logger.warning("the cache server warns: %s; what follows is in its own log alone", warned.message)
