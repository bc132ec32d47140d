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
from functools import partial
from random import Random

import numpy as np

from kvoffload.client.inventory import Heard
from kvoffload.client.joining import Joining, Member, OnLifeline, Step, ToSend
from kvoffload.client.lanes import LOOK_NS, Backoff, Lane, Lanes, Pending, Wire, make_ended
from kvoffload.client.memories import Memories
from kvoffload.client.settings import SECOND_NS, LinkSettings, LinkState
from kvoffload.client.subscription import Subscription
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
    ServerMessage,
    Subscribe,
    Warned,
)
from kvoffload.protocol.limits import MAX_FORMER
from kvoffload.protocol.message import ONE_WAY_OPS, Event, OneWay, Request

logger = logging.getLogger(__name__)

MOST_LINES = 100
"""The most warnings of one server that are logged. Later ones are counted, and stand in the server's own log."""
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
        self._redial = make_backoff(settings, random)
        self.lanes = Lanes(wire, partial(make_backoff, settings, random), has_blocks=register is not None)
        self.subscription = None if on_event is None else Subscription(on_event)

    @property
    def is_serving(self) -> bool:
        """It is joined, and the server answers what it asks."""
        return self.state is LinkState.SERVING and not self.lanes.main.breaker.is_open

    @property
    def is_prompt(self) -> bool:
        """Whether it is served, and no answer is late."""
        return self.state is LinkState.SERVING and self.lanes.main.breaker.silent_since_ns is None

    def has(self, capability: str) -> bool:
        """The server that it is served by has it, and this process may use it."""
        return self.state is LinkState.SERVING and capability in self._visit.capabilities

    # ---- what comes in ----

    def on_time(self, now_ns: int) -> None:
        """Does what is due. The caller calls it at `next_ns` at the latest."""
        visit = self._visit
        if self.is_dial_due(now_ns):
            self._dial(now_ns)
        elif visit.joining is not None and visit.joining.step is not Step.MEMORY and now_ns >= visit.join_by_ns:
            self.hang_up(now_ns, f"the server does not answer: awaited is its {visit.joining.step.value}")
        elif self.state is LinkState.SERVING:
            self._watch_answers(now_ns)
            self._go_on_events(now_ns)
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
        elif self.lanes.awaits_answers:
            at_ns = min(at_ns, now_ns + LOOK_NS)
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
            self.hang_up(now_ns, message.message)
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

    def hang_up(self, now_ns: int, line: str) -> None:
        """Ends the connection, for the reason that the line tells. The link dials again later."""
        if self.state not in (LinkState.JOINING, LinkState.SERVING):
            return
        if self.state is LinkState.SERVING or line != self.fault:
            logger.warning("not served by a cache server: %s", line)
        self.fault = line
        self._dial_ns = now_ns + self._redial.next_ns()
        self.is_closing = False
        self._leave(LinkState.DOWN)

    def _on_answer(self, lane: Lane, answer: Answer, now_ns: int) -> None:
        if self.state is not LinkState.SERVING:
            return
        if answer.boot_id != self.boot_id:
            self.hang_up(now_ns, "another server answers")
            return
        lane.breaker.on_answer(now_ns)
        if isinstance(answer.message, Event):
            if self.subscription is not None:
                self.subscription.hear(answer.message, answer.number)
                self._go_on_events(now_ns)
            return
        if isinstance(answer.message, Error):
            error = answer.message
            if error.code in _LOST_THREAD:
                # The server does not know this connection or session any more.
                self.hang_up(now_ns, error.message)
                return
            if error.about_op in ONE_WAY_OPS:
                logger.warning("the cache server refused: %s", error.message)
                return
        pending = lane.hear(answer.number)
        if pending is None or not pending.is_wanted:
            # No caller waits for it any more.
            unwanted = find_return(answer.message)
            if unwanted is not None:
                self.tell(unwanted, now_ns)
        if pending is not None:
            pending.end(answer.message if pending.is_wanted else None)
            if isinstance(pending.message, ListBlocks | Subscribe):
                self._go_on_events(now_ns)

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
            self.hang_up(now_ns, "the server does not read, or is gone")
        elif lane.needs_mark:
            lane.mark(self._visit.session, now_ns, self._settings.call_ns)

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
        assert self.subscription is not None, "no receiver of events was given"
        self.subscription.start(message, with_inventory=with_inventory)
        self._go_on_events(now_ns)

    def begin_inventory(self, now_ns: int) -> bool:
        """Starts the subscription's inventory from its beginning, once the server tells events. False: there is no
        inventory."""
        is_there = self.subscription is not None and self.subscription.begin_inventory()
        self._go_on_events(now_ns)
        return is_there

    def close(self) -> None:
        self._leave(LinkState.CLOSED)

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
            self.hang_up(now_ns, joining.fault)
            # Another thread that sees the refusal reads the fault next.
            self.refusal = joining.refusal
            return
        for one in messages:
            if not self._send(joining, one):
                self.hang_up(now_ns, "the server does not read, or is gone")
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
            self.hang_up(now_ns, "the server does not read, or is gone")

    def _start_serving(self, joining: Joining, now_ns: int) -> None:
        former = self.memories.current
        former_session = -1 if former is None else former.held.memory_session
        try:
            held = joining.take_memory()
            is_new = held is not None and self.memories.take(held)
        except (OSError, RuntimeError, ValueError) as fault:
            self.hang_up(now_ns, f"the server's memory cannot be mapped: {fault}")
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
        if self.subscription is not None:
            own = None
            if self.registered is not None and self._register is not None:
                own = NamespaceOpened(name_space=self.registered.name_space, fingerprint=self._register.fingerprint)
            self.subscription.join(own, has_inventory=self.has("inventory"), is_again=self.joins > 1)
            self._go_on_events(now_ns)
        if held is not None and self.state is LinkState.SERVING:
            self._visit.told_held = None
            self._tell_held(self._visit.capabilities, self.memories.list_mapped(), now_ns)

    # ---- being served ----

    def _go_on_events(self, now_ns: int) -> None:
        if self.subscription is not None and self.state is LinkState.SERVING:
            self.subscription.go_on(now_ns, lambda message: self.ask(message, now_ns, self._settings.call_ns))

    def _watch_answers(self, now_ns: int) -> None:
        for lane in self.lanes:
            lane.expire(now_ns)
            breaker = lane.breaker
            if breaker.is_open and now_ns - breaker.opened_ns >= int(self._settings.rejoin_after_s * SECOND_NS):
                self.hang_up(now_ns, "the server has not answered for long")
                return
            if breaker.take_probe(now_ns):
                lane.mark(self._visit.session, now_ns, self._settings.call_ns)

    def _leave(self, state: LinkState) -> None:
        """Ends the visit: stops the subscription, and closes descriptors that the server has begun to hand over."""
        if self.subscription is not None:
            self.subscription.leave()
        if self._visit.joining is not None:
            self._visit.joining.close()
        self._visit = _Visit()
        self._wire.hang_up()
        self.state = state
        self.lanes.reset()


def make_backoff(settings: LinkSettings, random: Random) -> Backoff:
    return Backoff(int(settings.first_backoff_s * SECOND_NS), int(settings.last_backoff_s * SECOND_NS), random)


def find_return(message: ServerMessage) -> OneWay | None:
    """Returns the message that gives back the lease or the slots that an answer brings; None: it brings none."""
    if isinstance(message, Acquired) and message.lease:
        return Release(leases=message.lease.to_bytes(8, "little"))
    if isinstance(message, CreditsGranted) and message.tickets:
        return Abort(tickets=message.tickets)
    return None


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
