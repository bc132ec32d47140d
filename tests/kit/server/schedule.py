"""One random life of a server, from one seed: engines save, hit, crash and come back; messages are lost, late, doubled
and out of order. A plain model says what each session must hold; everything is compared after every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

from kvoffload.cache import CacheGeometry, SessionId, needed_blocks
from kvoffload.protocol import (
    Abort,
    Acquire,
    Credits,
    Error,
    ErrorCode,
    HelloAccepted,
    Invalidate,
    Publish,
    Registered,
    Release,
    Subscribe,
    Welcome,
)
from kvoffload.protocol.message import OneWay
from kvoffload.server import ServerLimits
from kvoffload.types import AcquireOutcome
from tests.kit.cache.cache_model import (
    HYBRID,
    KIB,
    PLAIN,
    SMALL,
    block_hashes,
    has_pattern,
    make_chain,
    slot_bytes,
    write_record,
)
from tests.kit.server.harness import BOOT_ID, Client, Server, numbers, register_of

STEPS = 80
ENGINES = 3
TINY = replace(SMALL, memory_bytes=384 * KIB, segment_bytes=192 * KIB)
"""A pool so small that there is never enough memory."""
GEOMETRIES = {"engine 0": HYBRID, "engine 1": PLAIN, "engine 2": HYBRID}


@dataclass
class Slot:
    """A reserved slot: a session writes here, and no other may read or write."""

    geometry: CacheGeometry
    space: tuple[int, int]
    address: int
    name: bytes
    shards: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        return slot_bytes(self.geometry, self.space[1])


@dataclass
class Holding:
    """The slots and leases that one session of the cache must have."""

    members: set[int]
    """Pidfds of the session's processes."""
    slots: dict[int, Slot] = field(default_factory=dict)
    """Slots by ticket."""
    leases: dict[int, list[Slot]] = field(default_factory=dict)

    def size(self) -> int:
        leased = sum(slot.size for slots in self.leases.values() for slot in slots)
        return leased + sum(slot.size for slot in self.slots.values())


class EngineProcess(Client):
    """A process with a wire in front of it."""

    def hang_up(self) -> None:
        """It says nothing more on its connections."""
        self.server.close_lifeline(self.lifeline)
        self.server.core.close_connection(self.key)
        self.is_connected = False

    def start(self) -> None:
        self.outbox: deque[tuple[int, OneWay, bool]] = deque()
        """Number, message, whether it is late."""
        self.expected = 1
        self.is_connected = False
        self.is_alive = True
        self.known_tickets: list[int] = []
        self.known_leases: list[int] = []

    @property
    def geometry(self) -> CacheGeometry:
        return GEOMETRIES[self.engine]


class Schedule:
    """`run` raises AssertionError where the server does what it must not."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.server = Server(memory=TINY, limits=ServerLimits(queued_events=6, swept_blocks=16))
        self.holdings: dict[SessionId, Holding] = {}
        self.used_tickets: set[int] = set()
        self.processes: list[EngineProcess] = []
        self.router = self.server.process("router").watch()
        self.router.ask(Subscribe())
        self.event_number = 0

    def run(self) -> None:
        often = [self.save, self.load, self.load, self.finish, self.deliver, self.deliver, self.deliver]
        seldom = [self.forget, self.crash, self.exit_one, self.come_back, self.start_one, self.tick, self.watch]
        actions = [*often, *often, *seldom]
        with self.server:
            for _ in range(ENGINES):
                self.start_one()
            for _ in range(STEPS):
                self.random.choice(actions)()
                self.check()
            self.end()

    # ---- what engines do ----

    def start_one(self) -> None:
        if len(self.processes) < 8:
            process = EngineProcess(self.server, f"engine {self.random.randrange(ENGINES)}")
            process.start()
            self.processes.append(process)
            self.connect(process, {})

    def come_back(self) -> None:
        """After a reset, a closed lifeline, or for no reason; with or without a word of its former session."""
        process = self.pick()
        if process is not None and (not process.is_connected or self.random.random() < 0.2):
            former = {"former_session": process.session, "former_boot_id": BOOT_ID}
            process.hang_up()
            self.connect(process, former if self.random.random() < 0.8 else {})

    def connect(self, process: EngineProcess, former: dict[str, int]) -> None:
        before = process.session
        welcome = process.greet(**former)
        assert isinstance(welcome, Welcome), welcome
        process.outbox.clear()
        process.expected, process.one_way = 1, 0
        session = self.server.core.sessions.find(process.session)
        assert session is not None
        assert session.cache_session is not None
        assert welcome.is_reopened == bool(former and welcome.session == before)
        self.learn_ended()
        holding = self.holdings.setdefault(session.cache_session, Holding(members=set()))
        holding.members -= self.server.cache.exited
        holding.members.add(process.pidfd.number)
        assert isinstance(process.connect(), HelloAccepted)
        answer = process.ask(register_of(process.geometry, str(process.geometry is HYBRID)))
        assert isinstance(answer, Registered), answer
        process.name_space = answer.name_space
        process.is_connected = True
        self.forget_resets()

    def save(self) -> None:
        """All blocks of a conversation, as far as there is room; each message may still be lost on its way."""
        process, chain = self.pick(is_connected=True), self.chain()
        for group in range(len(process.geometry.groups) if process is not None else 0):
            assert process is not None
            self.save_group(process, chain, group)

    def save_group(self, process: EngineProcess, chain: bytes, group: int) -> None:
        names = block_hashes(chain, process.geometry, group)
        answer = self.ask(process, Credits(name_space=process.name_space, group=group, hashes=b"".join(names)))
        if answer is None:
            return
        tickets, addresses = numbers(answer.tickets).tolist(), numbers(answer.addresses).tolist()
        granted = [at for at, ticket in enumerate(tickets) if ticket]
        for at in granted:
            assert tickets[at] not in self.used_tickets, "a ticket was given twice"
            self.used_tickets.add(tickets[at])
            slot = Slot(process.geometry, (process.name_space, group), addresses[at], names[at])
            self.holding(process).slots[tickets[at]] = slot
        if self.random.random() < 0.05:
            return  # The answer is lost: only the server knows these tickets.
        process.known_tickets += [tickets[at] for at in granted]
        parents = [bytes(32), *names] if group == 0 else names
        for shard in range(process.geometry.groups[group].shards):
            for at in granted:
                space = (process.name_space, group)
                write_record(self.server.cache, process.geometry, space, names[at], addresses[at], shard)
            message = Publish(
                name_space=process.name_space,
                group=group,
                shard=shard,
                tickets=b"".join(tickets[at].to_bytes(8, "little") for at in granted),
                hashes=b"".join(names[at] for at in granted),
                parents=b"".join(parents[at] for at in granted),
            )
            self.put(process, message)
            if self.random.random() < 0.1:
                self.put(process, message)  # Twice: its tickets are void by then, or this shard is there.

    def load(self) -> None:
        """A hit has the right bytes, and is leased."""
        process, chain = self.pick(is_connected=True), self.chain()
        if process is None:
            return
        local = self.random.choice([0, 0, 16, 32])
        answer = self.ask(process, Acquire(name_space=process.name_space, chain=chain, local=local))
        if answer is None or answer.outcome is not AcquireOutcome.HIT:
            return
        slots = []
        for group, (leased, settings) in enumerate(zip(answer.groups, process.geometry.groups, strict=True)):
            needed = needed_blocks(settings.rule, local=local, boundary=answer.boundary)
            names = block_hashes(chain, process.geometry, group)
            for at, address in zip(needed, numbers(leased.addresses).tolist(), strict=True):
                slots.append(Slot(process.geometry, (process.name_space, group), address, names[at]))
        if answer.lease:
            self.holding(process).leases[answer.lease] = slots
            process.known_leases.append(answer.lease)

    def finish(self) -> None:
        """Releases and aborts, of what is over already, too."""
        process = self.pick(is_connected=True)
        if process is None:
            return
        leases = self.random.sample(process.known_leases, len(process.known_leases) // 2 + bool(process.known_leases))
        self.put(process, Release(leases=b"".join(lease.to_bytes(8, "little") for lease in leases)))
        if process.known_tickets and self.random.random() < 0.5:
            tickets = self.random.sample(process.known_tickets, 1)
            self.put(process, Abort(tickets=tickets[0].to_bytes(8, "little")))

    def forget(self) -> None:
        process = self.pick(is_connected=True)
        if process is not None:
            self.put(process, Invalidate(name_space=process.name_space, group=0, hashes=self.chain()))

    def crash(self) -> None:
        """Ends the lifeline; the process may still be copying."""
        process = self.pick()
        if process is not None and self.random.random() < 0.3:
            process.hang_up()
            self.forget_resets()

    def exit_one(self) -> None:
        """Its lifeline may be seen to end before or after, or only at the next greeting."""
        process = self.pick()
        if process is None or self.random.random() < 0.5:
            return
        self.processes.remove(process)
        self.server.cache.exited.add(process.pidfd.number)
        if self.random.random() < 0.5:
            self.server.core.tick()
        self.server.close_lifeline(process.lifeline)
        self.forget_resets()

    # ---- the wire ----

    def ask(self, process: EngineProcess, message: Any) -> Any:
        """Asks. None: the request was lost, or dropped as it came late."""
        if self.random.random() < 0.1:
            return None
        process.expires_ns = self.server.now_ns if self.random.random() < 0.1 else 0
        answer = process.ask(message)
        if process.expires_ns:
            assert answer is None
        process.expires_ns = 0
        assert not isinstance(answer, Error), answer
        return answer

    def put(self, process: EngineProcess, message: OneWay) -> None:
        process.one_way += 1
        process.outbox.append((process.one_way, message, self.random.random() < 0.02))

    def deliver(self) -> None:
        """The next messages of a process, unless the wire does something to them."""
        process = self.pick()
        if process is None or not process.outbox:
            return
        fault = self.random.random()
        if fault < 0.02:
            process.outbox.popleft()
        elif fault < 0.04:
            process.outbox.rotate(-1)
        elif fault < 0.06:
            process.outbox.append(process.outbox[0])
        for _ in range(min(len(process.outbox), self.random.randint(1, 12))):
            self.arrive(process, *process.outbox.popleft())

    def arrive(self, process: EngineProcess, number: int, message: OneWay, is_late: bool) -> None:
        """Where a number is not the next one, the channel ends, and its process has to come back."""
        if not process.is_connected:
            return
        process.expires_ns = self.server.now_ns if is_late else 0
        answer = process.tell(message, number=number)
        process.expires_ns = 0
        if number != process.expected:
            assert isinstance(answer, Error)
            assert answer.code is ErrorCode.OUT_OF_ORDER
            process.express.wait_for_end()
            process.hang_up()
        else:
            process.expected += 1
            assert answer is None, answer
            if not is_late:
                self.apply(self.holding(process), message)

    def apply(self, holding: Holding, message: OneWay) -> None:
        match message:
            case Publish():
                for ticket in numbers(message.tickets).tolist():
                    slot = holding.slots.get(ticket)
                    if slot is not None:
                        slot.shards.add(message.shard)
                        if len(slot.shards) == slot.geometry.groups[slot.space[1]].shards:
                            del holding.slots[ticket]
            case Abort():
                for ticket in numbers(message.tickets).tolist():
                    holding.slots.pop(ticket, None)
            case Release():
                for lease in numbers(message.leases).tolist():
                    holding.leases.pop(lease, None)

    # ---- what must hold ----

    def check(self) -> None:
        self.learn_ended()
        cache = self.server.cache
        for session, holding in self.holdings.items():
            assert cache.held_bytes(session) == holding.size()
        stats = cache.stats
        assert stats.reserved == sum(len(holding.slots) for holding in self.holdings.values())
        assert stats.leases == sum(len(holding.leases) for holding in self.holdings.values())
        written = [slot for holding in self.holdings.values() for slot in holding.slots.values()]
        read = {slot.address: slot for slot in self.leased()}
        taken = sorted((slot.address, slot.size) for slot in [*written, *read.values()])
        for (address, size), (behind, _) in pairwise(taken):
            assert address + size <= behind, "a slot is used twice"
        for slot in read.values():
            assert has_pattern(cache, slot.geometry, slot.space, slot.name, slot.address), "leased bytes changed"

    def learn_ended(self) -> None:
        """Memory is taken back when all processes have exited, and not before."""
        cache = self.server.cache
        for session in [session for session in self.holdings if session not in cache.members]:
            assert self.holdings.pop(session).members <= cache.exited, "memory was taken from a living process"

    def end(self) -> None:
        """Ends all processes, after which nothing is left."""
        for process in self.processes:
            self.server.exit_process(process)
        self.server.core.tick()
        self.check()
        assert not self.holdings
        stats = self.server.cache.stats
        assert (stats.leases, stats.reserved, stats.quarantined, stats.sessions) == (0, 0, 0, 0)
        assert [session.is_observer for session in self.server.core.sessions] == [True]
        self.watch()

    def tick(self) -> None:
        self.server.now_ns += 1
        self.server.core.tick()

    def watch(self) -> None:
        for _, number in self.server.core.feed.take(self.router.key, self.random.randint(1, 10)):
            assert number == self.event_number + 1
            self.event_number = number

    # ---- small things ----

    def pick(self, *, is_connected: bool = False) -> EngineProcess | None:
        self.forget_resets()
        able = [process for process in self.processes if process.is_connected or not is_connected]
        return self.random.choice(able) if able else None

    def forget_resets(self) -> None:
        """Connections that ended with their session, by what the table says."""
        for process in self.processes:
            known = self.server.core.sessions.find_connection(process.key)
            process.is_connected = process.is_connected and known is not None

    def holding(self, process: EngineProcess) -> Holding:
        session = self.server.core.sessions.find(process.session)
        assert session is not None
        assert session.cache_session is not None
        return self.holdings[session.cache_session]

    def leased(self) -> list[Slot]:
        return [slot for held in self.holdings.values() for slots in held.leases.values() for slot in slots]

    def chain(self) -> bytes:
        return make_chain(self.random.randrange(3), self.random.choice([3, 4, 8]))
