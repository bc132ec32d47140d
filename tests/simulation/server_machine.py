"""The machine's cache servers, one after the other: the core, with what `CacheServer` does around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.protocol import (
    CAPABILITIES,
    Acquired,
    AdoptVerdict,
    Answer,
    Call,
    Channel,
    ClosingReason,
    CreditsGranted,
    Error,
    ErrorCode,
    Express,
    Farewell,
    Greeting,
    HandshakeSettings,
    Holding,
    Memory,
    Offer,
    Quarantine,
    Registered,
    ServerMessage,
)
from kvoffload.protocol.message import OneWay
from kvoffload.server import CoreSettings, DomainSettings, Peer, SendMemory, ServerCore, ToConnection
from kvoffload.server.sessions.outbox import OpenExpress, Sendable, ToLifeline
from kvoffload.server.tiering.chain import TierChain
from tests.simulation.channels import Connection, Hangup, Packet
from tests.simulation.express_model import ExpressModel
from tests.simulation.model_entries import SLOT_BYTES
from tests.simulation.process import FIRST_DESCRIPTOR, Process, describe_memory, find_number
from tests.simulation.tier_model import make_traffic
from tests.simulation.timeline import MILLISECOND_NS

if TYPE_CHECKING:
    from tests.simulation.memory import AnyCache, AnyMemory
    from tests.simulation.world import World

TICK_NS = 250 * MILLISECOND_NS
_HANDSHAKE = HandshakeSettings(capabilities=frozenset(CAPABILITIES), domain="", software="simulated")


@dataclass(eq=False)
class FakePidfd:
    """A pidfd, which is the process's number. It has one owner at every moment."""

    number: int
    is_over: bool = False

    def take(self) -> int:
        assert not self.is_over
        self.is_over = True
        return self.number

    def close(self) -> None:
        self.is_over = True


class Server:
    """One run of the server's program."""

    def __init__(self, world: World, *, adopt_wait_ns: int, take_ns: int) -> None:
        self.world = world
        self.timeline = world.timeline
        self.boot_id = world.timeline.random.getrandbits(62) | 1
        self.name = f"server {self.boot_id % 0x10000:04x}"
        self.is_alive = True
        self.is_draining = False
        self.stopped: list[tuple[Any, ...]] | None = None
        """Items that came while the server is stopped; None: it runs."""
        self.memory: AnyMemory | None = None
        self._cache: AnyCache | None = None
        self._adopted_boot_id = 0
        self._take_ns = take_ns
        self._is_taking = False
        self._adopt_until_ns = self.timeline.now_ns + adopt_wait_ns
        self.processes: dict[int, Process] = {}
        """Processes by lifeline and control connection."""
        self._connections: dict[int, Connection] = {}
        self._express: dict[int, tuple[Connection, ExpressModel]] = {}
        """Express channels by lifeline."""
        self.pid = world.draw_number()
        self.traffic = None if world.disk is None else make_traffic(self, world.disk, self.pid)
        self._tiers_due_ns = 0
        settings = CoreSettings(boot_id=self.boot_id, handshake=_HANDSHAKE, control="ipc://control", pid=1, uid=0)
        self.core = ServerCore(
            settings,
            (DomainSettings(name=""),),
            draw=lambda: self.timeline.random.getrandbits(32),
            tiers={} if self.traffic is None else {"": TierChain([self.traffic])},
        )
        self.note("STARTS, waits for memory for %d ms", adopt_wait_ns / 1e6)
        self.timeline.at(self._adopt_until_ns, self._call, self._begin_taking)
        self.timeline.after(TICK_NS, self._call, self._tick)

    @property
    def is_stopped(self) -> bool:
        return self.stopped is not None

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks are under way to or from the tier, or held for a request."""
        if self.traffic is None:
            return False
        writes, reads = self.traffic.writes, self.traffic.reads
        return writes.is_moving or reads.is_moving or reads.waiting > 0

    def note(self, what: str, *arguments: Any) -> None:
        self.timeline.note(self.name, what, *arguments)

    # ---- what happens to it ----

    def kill(self) -> None:
        """Its memory has no owner any more; engines see their lifelines end."""
        if not self.is_alive:
            return
        self.note("DIES")
        self.is_alive = False
        for connection in self._connections.values():
            connection.close_by_server()
        if self._cache is not None:
            self._cache.close()
        self.world.exit_server(self.pid)

    def stop(self) -> None:
        if self.is_alive and self.stopped is None:
            self.note("STOPS")
            self.stopped = []

    def go_on(self) -> None:
        waiting, self.stopped = self.stopped or [], None
        if self.is_alive:
            self.note("goes on")
            for act, *arguments in waiting:
                self._call(act, *arguments)

    def drain(self) -> None:
        self._call(self._drain)

    # ---- connections ----

    def accept(self, lifeline: Connection, process: Process) -> None:
        lifeline.to_server = lambda connection, item: self._call(self._on_lifeline, connection, item)
        self._connections[lifeline.number] = lifeline
        self.processes[lifeline.number] = process

    def accept_control(self, control: Connection, process: Process) -> None:
        control.to_server = lambda connection, item: self._call(self._on_control, connection, item)
        self._connections[control.number] = control
        self.processes[control.number] = process

    def _on_lifeline(self, lifeline: Connection, item: Packet | Hangup) -> None:
        if isinstance(item, Hangup):
            self._close_lifeline(lifeline)
            return
        message = item.content.message
        if isinstance(message, Greeting):
            process = self.processes[lifeline.number]
            peer = Peer(pid=process.pid, uid=1000)
            pidfd = FakePidfd(process.pid)
            former = self._find_former(process)
            sent = self.core.greet(lifeline.number, item.content, peer, pidfd, self.timeline.now_ns)
            self._send(sent)
            assert pidfd.is_over or self.memory is None, "nobody has the pidfd"
            session = self.core.sessions.find_lifeline(lifeline.number)
            is_found = session is None or former in (0, session.cache_session)
            assert is_found, f"{process.name} does not get its session {former} back"
        elif isinstance(message, Offer):
            self._on_offer(lifeline, message, item.descriptors)
        elif isinstance(message, Holding):
            self._send(self.core.hear_holding(lifeline.number, message))
        elif isinstance(message, Farewell):
            self._close_lifeline(lifeline)

    def _close_lifeline(self, lifeline: Connection) -> None:
        self._end_express(lifeline.number)
        lifeline.close_by_server()
        self.core.close_lifeline(lifeline.number)

    def _end_express(self, lifeline: int) -> None:
        if lifeline in self._express:
            self._express.pop(lifeline)[0].close_by_server()

    def _on_express(self, connection: Connection, model: ExpressModel, item: Packet | Hangup) -> None:
        if isinstance(item, Hangup):
            connection.close_by_server()
            return
        call: Call = item.content
        answer = model.serve(call, self.timeline.now_ns, is_draining=self.is_draining)
        if answer is not None:
            process = self.processes[connection.number]
            if isinstance(answer, CreditsGranted | Acquired):
                assert self.memory is not None
                self.world.ledger.grant(process, connection, self.memory, answer)
            connection.send_answer(Answer(answer, call.number, self.boot_id))

    def _on_control(self, control: Connection, item: Packet) -> None:
        call: Call = item.content
        sent = self.core.handle(control.key, call, self.timeline.now_ns)
        if isinstance(call.message, OneWay):
            is_refused = any(isinstance(one, ToConnection) and isinstance(one.message, Error) for one in sent)
            assert is_refused or call.number == control.one_way + 1, "a gap was not seen"
            control.one_way += not is_refused
        self._send(sent)

    def _find_former(self, process: Process) -> int:
        """The session that the process must get, by its number in the memory; 0: whichever."""
        memory, mapped = self.memory, process.link.memories.current
        if memory is None or mapped is None or self.is_draining:
            return 0
        if mapped.held.boot_id not in (self.boot_id, self._adopted_boot_id):
            return 0
        number = mapped.held.session % (1 << 32)
        has_other = any(one.is_open and one.engine == process.engine for one in self.core.sessions)
        is_there = bool(memory.members(number) - self.world.ledger.exited)
        return number if is_there and not has_other and process.truth == (memory.number, number) else 0

    def _on_offer(self, lifeline: Connection, offer: Offer, descriptors: tuple[int, ...]) -> None:
        if not self.core.is_offer_wanted(lifeline.number, offer.former_boot_id):
            return
        assert len(descriptors) == 3
        assert offer.is_last
        memory = self.world.memories[find_number(descriptors[1])]
        if memory.has_owner:
            self.note("finds an owner of memory %d", memory.number)
            session = self.core.sessions.find_lifeline(lifeline.number)
            assert session is not None
            self.core.refuse_offer(session, AdoptVerdict.OWNER_LIVES)
            return
        before = memory.readable_names()
        cache = self.world.adopt(memory)
        assert memory.readable_names() == before, "adopted memory lost entries"
        self._attach(memory, cache, offer.former_boot_id)

    # ---- memory ----

    def _begin_taking(self) -> None:
        if self.memory is None and not self._is_taking and not self.is_draining:
            self._is_taking = True
            self.timeline.after(self._take_ns, self._call, self._end_taking)

    def _end_taking(self) -> None:
        if self.memory is None and not self.is_draining:
            memory, cache = self.world.create_memory()
            self._attach(memory, cache, 0)

    def _attach(self, memory: AnyMemory, cache: AnyCache, adopted_boot_id: int) -> None:
        self.note("serves memory %d, adopted of %x", memory.number, adopted_boot_id)
        self.memory, self._cache, self._adopted_boot_id = memory, cache, adopted_boot_id
        self._send(self.core.attach_memory("", cache, adopted_boot_id=adopted_boot_id))

    # ---- inside ----

    def _call(self, act: Any, *arguments: Any) -> None:
        if self.stopped is not None:
            self.stopped.append((act, *arguments))
        elif self.is_alive and not self.world.may_fail_here(self):
            act(*arguments)
            self._advance_tiers()
            faults = self.core.faults.logged
            assert not faults, f"{self.name} met a fault of its own: {faults}"
            if self.is_draining and self.core.is_drained(self.timeline.now_ns):
                self._end()

    def end_io(self, act: Any, *arguments: Any) -> None:
        """A batch of the tier has ended; while the process is stopped, nothing does."""
        self._call(act, *arguments)

    def _advance_tiers(self) -> None:
        """As the loop does in each of its turns, of which there is one when something is due."""
        self._send(self.core.advance(self.timeline.now_ns))
        due_ns = self.core.tiers.next_ns()
        if due_ns is not None and self._tiers_due_ns not in range(self.timeline.now_ns, due_ns + 1):
            self._tiers_due_ns = max(due_ns, self.timeline.now_ns) + MILLISECOND_NS
            self.timeline.at(self._tiers_due_ns, self._call, lambda: None)

    def _tick(self) -> None:
        self.core.tick()
        self.timeline.after(TICK_NS, self._call, self._tick)

    def _drain(self) -> None:
        if not self.is_draining:
            self.note("DRAINS")
            self.is_draining = True
            self._send(self.core.start_drain(self.timeline.now_ns, reason=ClosingReason.DRAINED))

    def _end(self) -> None:
        """Ends with the sockets first: the next server may be there before the memory has lost its owner."""
        self.note("ends")
        self.is_alive = False
        for connection in self._connections.values():
            connection.close_by_server()
        if self._cache is not None:
            self.timeline.after(self.timeline.between_ms(0.1, 30), self._cache.close)
        self.world.exit_server(self.pid)

    def _send(self, messages: list[Sendable]) -> None:
        for one in messages:
            if isinstance(one, ToConnection):
                self._send_control(int(one.connection), one.message, one.number)
            elif isinstance(one, SendMemory):
                self._send_memory(one)
            elif isinstance(one, OpenExpress):
                self._open_express(one)
            else:
                assert isinstance(one, ToLifeline)
                if isinstance(one.message, Quarantine):
                    self._end_express(one.lifeline)
                self._connections[one.lifeline].send_answer(Answer(one.message, one.number, self.boot_id))

    def _send_control(self, number: int, message: ServerMessage, call_number: int) -> None:
        connection = self._connections[number]
        if isinstance(message, Registered):
            assert self.memory is not None
            connection.truth = (self.memory.number, message.resume % (1 << 32))
        if not connection.send_answer(Answer(message, call_number, self.boot_id)):
            self.core.close_connection(connection.key)

    def _open_express(self, wanted: OpenExpress) -> None:
        """Now and then there are too many."""
        if self.timeline.chance(0.1):
            busy = Error(code=ErrorCode.BUSY, message="there are too many")
            self._connections[wanted.lifeline].send_answer(Answer(busy, 2, self.boot_id))
            return
        session = self.core.sessions.find_lifeline(wanted.lifeline)
        assert session is not None
        assert session.registration is not None
        assert self._cache is not None
        process = self.processes[wanted.lifeline]
        connection = process.wire.connect(Channel.EXPRESS, process.on_express, tells_end=True)
        assert self.memory is not None
        connection.truth = self.memory.number, wanted.cache_session
        model = ExpressModel(
            wanted.session, wanted.cache_session, session.registration, self._cache, wanted.space, self.core
        )
        connection.to_server = lambda end, item: self._call(self._on_express, end, model, item)
        self._connections[connection.number] = connection
        self.processes[connection.number] = process
        self._express[wanted.lifeline] = connection, model
        descriptor = FIRST_DESCRIPTOR - connection.number
        self.world.express_ends[descriptor] = connection
        self._connections[wanted.lifeline].send_answer(Answer(Express(), 2, self.boot_id), (descriptor,))

    def _send_memory(self, wanted: SendMemory) -> None:
        assert self.memory is not None
        size = len(self.memory) * SLOT_BYTES
        message = Memory(
            index_bytes=1 << 16,
            segments=1,
            first=0,
            segment_sizes=np.array([size], "<u8").tobytes(),
            adopted_boot_id=wanted.adopted_boot_id,
        )
        answer = Answer(message, 1, self.boot_id)
        self._connections[wanted.lifeline].send_answer(answer, describe_memory(self.memory.number))


class Machine:
    """Where servers run. One at a time has the socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.server: Server | None = None

    @property
    def listener(self) -> Server | None:
        """The server that has the socket."""
        return self.server if self.server is not None and self.server.is_alive else None

    def start(self) -> None:
        if self.listener is None:
            timeline = self._world.timeline
            wait_ns = timeline.random.choice([0, 300, 2000]) * MILLISECOND_NS
            self.server = Server(self._world, adopt_wait_ns=wait_ns, take_ns=timeline.between_ms(2, 60))
