"""A process of an engine: the client's own link and block calls, on wires that the schedule holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.client.block_calls import BlockCalls
from kvoffload.client.joining import HeldMemory, Member
from kvoffload.client.lanes import Lane, Pending
from kvoffload.client.link import Link
from kvoffload.client.memories import Memories
from kvoffload.client.settings import LinkSettings, LinkState
from kvoffload.protocol import (
    Acquired,
    Answer,
    Call,
    Channel,
    CreditsGranted,
    Error,
    ErrorCode,
    Register,
    Retire,
    Role,
    Stats,
)
from kvoffload.protocol.message import OneWay
from tests.simulation.channels import Connection, Hangup, Packet
from tests.simulation.timeline import SECOND_NS

if TYPE_CHECKING:
    from tests.simulation.memory import AnyMemory
    from tests.simulation.world import World

REFUSALS = (
    ErrorCode.NO_SESSION,
    ErrorCode.NOT_GREETED,
    ErrorCode.OUT_OF_ORDER,
    ErrorCode.DRAINING,
    ErrorCode.BUSY,
)
"""Errors that a client has to live with. Any other shows a mistake of the client."""
FIRST_DESCRIPTOR = 1_000_000_000
"""Numbers that are no real descriptors: closing them does nothing."""


def describe_memory(number: int) -> tuple[int, int, int]:
    """Descriptors of its lock, its index and its one segment."""
    first = FIRST_DESCRIPTOR + 8 * number
    return first, first + 1, first + 2


def find_number(descriptor: int) -> int:
    return (descriptor - FIRST_DESCRIPTOR) // 8


@dataclass(eq=False)
class MappedMemory:
    """The simulated counterpart of `SharedMemory`."""

    held: HeldMemory
    memory_id: int
    index: AnyMemory
    sessions: set[int]
    is_closed: bool = False

    @property
    def segments(self) -> AnyMemory:
        return self.index

    @property
    def ready_bytes(self) -> int:
        return 1

    def watch(self) -> Callable[[], bool]:
        return lambda: False

    def join(self, held: HeldMemory) -> None:
        self.held = replace(self.held, boot_id=held.boot_id, session=held.session)
        self.sessions.add(held.memory_session)

    def close(self) -> None:
        self.is_closed = True


class SimWire:
    """All channels of one process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self.lifeline: Connection | None = None
        self.control: Connection | None = None
        self.express: Connection | None = None
        self._held_back: Call | None = None
        self.refused = 0
        """Messages that were not taken on the control connection."""

    def dial(self) -> str:
        server = self._world.machine.listener
        if server is None or (server.is_stopped and self._world.timeline.chance(0.1)):
            return "nobody listens"
        self.lifeline = self.connect(Channel.LIFELINE, self._process.on_lifeline, tells_end=True)
        server.accept(self.lifeline, self._process)
        return ""

    def open_control(self, endpoint: str) -> None:
        # The server that has this path now: it need not be the one that was dialled.
        server = self._world.machine.listener
        self.control = self.connect(Channel.CONTROL, self._process.on_control, tells_end=False)
        if server is not None:
            server.accept_control(self.control, self._process)

    def send_lifeline(self, call: Call, descriptors: tuple[int, ...]) -> bool:
        self._process.note("sends %s", call.message)
        return self.lifeline is not None and self.lifeline.send_call(call, descriptors)

    def send_control(self, call: Call) -> bool:
        if self.control is None or self._world.has_fault("full", 0.001):
            self.refused += 1
            return False
        self._process.note("sends %d %s", call.number, call.message)
        if not isinstance(call.message, OneWay) or not self._world.is_lossy:
            return self.control.send_call(call)
        if self._held_back is not None:
            late, self._held_back = self._held_back, None
            return self.control.send_call(call) and self.control.send_call(late)
        if self._world.has_fault("loss", 0.01):
            self._process.note("LOST: %d", call.number)
            self._world.ledger.excuse(self._process, call.message)
            return True
        if self._world.has_fault("reordering", 0.01):
            self._process.note("HELD BACK: %d", call.number)
            self._world.ledger.excuse(self._process, call.message)
            self._held_back = call
            return True
        if self._world.has_fault("duplicate", 0.01):
            self._process.note("TWICE: %d", call.number)
            self.control.send_call(call)
        return self.control.send_call(call)

    def open_express(self, descriptor: int) -> None:
        if self.express is not None:
            self.express.close_by_client()
        self.express = self._world.express_ends.pop(descriptor)

    def send_express(self, call: Call) -> bool:
        self._process.note("sends express %d %s", call.number, call.message)
        return self.express is not None and self.express.send_call(call)

    def hang_up(self) -> None:
        self._held_back = None
        for connection in self.all_open:
            connection.close_by_client()
        self.lifeline = self.control = self.express = None

    @property
    def all_open(self) -> list[Connection]:
        return [one for one in (self.lifeline, self.control, self.express) if one is not None]

    def connect(self, channel: Channel, to_client: Callable[[Connection, Any], None], *, tells_end: bool) -> Connection:
        world = self._world
        connection = Connection(
            world.timeline, world.draw_number(), channel, to_client, codes=world.codes, tells_end=tells_end
        )
        if self._process.lags_until_ns > world.timeline.now_ns:
            connection.lag(self._process.lags_until_ns)
        return connection


class Process:
    """The simulated counterpart of `Client`: it gives the link its messages, and keeps time."""

    def __init__(
        self, world: World, engine: str, role: Role, rank: int, register: Register, settings: LinkSettings
    ) -> None:
        self.world = world
        self.engine = engine
        self.role = role
        self.rank = rank
        self.pid = world.draw_number()
        self.name = f"{engine}.{'s' if role is Role.SCHEDULER else 'w'}{rank}#{self.pid}"
        self.settings = settings
        self.register = register
        self.is_alive = True
        self.stopped: list[Callable[[], None]] | None = None
        """Calls that came while the process is stopped; None: it runs."""
        self.lags_until_ns = 0
        self.last_stop_ns = 0
        self.truth: tuple[int, int] | None = None
        """Memory and session in it, by the server's word, of the last join."""
        self.mapped: list[int] = []
        self.asked_ns: dict[int, int] = {}
        """When a server asked for former memories, by memory."""
        """Memories, one after the other."""
        self.visits = 0
        """How often it was given another memory or session."""
        self._timer_ns = 0
        self._question: Pending | None = None
        self._served_on: Connection | None = None
        self.wire = SimWire(world, self)
        self.link = Link(
            Member(engine=engine, role=role, rank=rank, pid=self.pid, uid=1000),
            register,
            settings,
            self.wire,
            Memories(
                keeps_former=role is Role.WORKER,
                open_memory=self._map,
                name=lambda held: find_number(held.index),
            ),
            pidfd=FIRST_DESCRIPTOR - self.pid,
            random=world.timeline.random,
        )
        self.blocks = BlockCalls(self.link, register, settings)
        self._joins = self._sessions = 0
        """Joins and sessions of the link that were compared with the server's word."""
        world.timeline.after(0, self.turn)

    def note(self, what: str, *arguments: Any) -> None:
        if self.world.timeline.trace is not None:
            self.world.timeline.note(self.name, what, *arguments)

    @property
    def now_ns(self) -> int:
        return self.world.timeline.now_ns

    # ---- what comes in ----

    def turn(self) -> None:
        """Does what the client's thread does when a message may have come."""
        if self.link.joins != self._joins:
            self._check_join()
        if not self.is_alive:
            return
        if self.stopped is not None:
            self.stopped.append(self.turn)
            return
        self.link.on_time(self.now_ns)
        self.blocks.refill(self.now_ns)
        self._keep_time()

    def on_lifeline(self, connection: Connection, item: Packet | Hangup) -> None:
        if not self.is_alive or connection is not self.wire.lifeline:
            return
        if self.stopped is not None:
            self.stopped.append(lambda: self.on_lifeline(connection, item))
            return
        if isinstance(item, Hangup):
            self.note("lifeline has ended")
            self.link.hang_up(self.now_ns, "the other end has closed the connection")
        elif not self.world.may_fail_here(self):
            self.note("receives %s", item.content.message)
            if isinstance(item.content.message, Retire):
                asked = np.frombuffer(item.content.message.memories, "<u8").tolist()
                self.asked_ns.update(dict.fromkeys(asked, self.now_ns))
            self.link.on_lifeline(item.content, list(item.descriptors), self.now_ns)
        self.turn()

    def on_control(self, connection: Connection, item: Packet) -> None:
        if not self.is_alive or connection is not self.wire.control:
            return
        if self.stopped is not None:
            self.stopped.append(lambda: self.on_control(connection, item))
        elif not self.world.may_fail_here(self):
            self._served_on = connection
            self._on_answer(connection, item, self.link.on_control, self.link.lanes.control)

    def on_express(self, connection: Connection, item: Packet | Hangup) -> None:
        if not self.is_alive or connection is not self.wire.express:
            return
        if self.stopped is not None:
            self.stopped.append(lambda: self.on_express(connection, item))
        elif isinstance(item, Hangup):
            self.note("express channel has ended")
            self.link.hang_up(self.now_ns, "the server has closed the express channel")
            self.turn()
        elif not self.world.may_fail_here(self):
            self._on_answer(connection, item, self.link.on_express, self.link.lanes.express)

    def _on_answer(self, connection: Connection, item: Packet, hear: Callable[[Answer, int], None], lane: Lane) -> None:
        answer: Answer = item.content
        self.note("receives %d %s", answer.number, answer.message)
        if isinstance(answer.message, CreditsGranted | Acquired) and self.link.state is LinkState.SERVING:
            self.world.ledger.deliver(self, connection, answer.message)
        is_refused = isinstance(answer.message, Error) and answer.message.code not in REFUSALS
        assert not is_refused, f"{self.name} asks for what is not there: {answer.message}"
        refused = self.wire.refused
        hear(answer, self.now_ns)
        is_asked = not lane.breaker.is_open or self.wire.refused > refused
        assert is_asked or self.link.state is not LinkState.SERVING, "a server that answers is not asked"
        self.turn()

    def is_answered(self) -> bool:
        """Whether it is served, and a question since the last such call has been answered."""
        last, self._question = self._question, None
        if self.is_alive and self.link.is_serving:
            self._question = self.link.ask(Stats(), self.now_ns, SECOND_NS)
            self.turn()
        return self._question is not None and last is not None and last.answer is not None

    # ---- what happens to it ----

    def stop(self) -> None:
        if self.is_alive and self.stopped is None:
            self.note("STOPS")
            self.stopped = []

    def go_on(self) -> None:
        self.last_stop_ns = self.now_ns
        waiting, self.stopped = self.stopped or [], None
        if self.is_alive:
            self.note("goes on")
            for act in waiting:
                act()

    def crash(self) -> None:
        """The kernel closes its ends; a moment later its pidfd reports."""
        if self.is_alive:
            self.note("CRASHES")
            self.is_alive = False
            self.wire.hang_up()
            self.world.exit_process(self)

    def lag(self, until_ns: int) -> None:
        """Lets nothing pass between it and any server."""
        self.note("LAGS")
        self.lags_until_ns = until_ns
        for connection in self.wire.all_open:
            connection.lag(until_ns)

    # ---- inside ----

    def _keep_time(self) -> None:
        at_ns = self.link.next_ns(self.now_ns)
        if not self.now_ns < self._timer_ns <= at_ns:
            self._timer_ns = at_ns
            self.world.timeline.at(at_ns, self._on_timer, at_ns)

    def _on_timer(self, at_ns: int) -> None:
        if at_ns == self._timer_ns:
            self._timer_ns = 0
            self.turn()

    def _map(self, held: HeldMemory) -> MappedMemory:
        number = find_number(held.index)
        self.mapped.append(number)
        self.asked_ns.pop(number, None)
        return MappedMemory(held, number, self.world.memories[number], {held.memory_session})

    def _check_join(self) -> None:
        """Compares a join with what the server knows: whether the session of before goes on."""
        assert self.link.joins == self._joins + 1
        goes_on = self.link.sessions == self._sessions
        self._joins, self._sessions = self.link.joins, self.link.sessions
        assert self._served_on is not None
        truth = self._served_on.truth
        self.note("is JOINED, goes on: %s, memory and session %s before %s", goes_on, truth, self.truth)
        if goes_on != (truth == self.truth):
            raise AssertionError(f"{self.name} was told goes_on={goes_on}, but has {truth} after {self.truth}")
        self.visits += not goes_on
        self.truth = truth
