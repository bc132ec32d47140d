"""One schedule: engines, servers, and everything that may happen to them, from one seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TypeVar

from kvoffload.client.settings import LinkSettings
from kvoffload.protocol import GroupTerms, Register, Role
from kvoffload.types import ReuseRule
from tests.kit.cache.cache_model import fingerprint
from tests.simulation.channels import Connection
from tests.simulation.engine import TOKENS, Scheduler, Worker
from tests.simulation.faults import inject_fault
from tests.simulation.ledger import Ledger
from tests.simulation.memory import AnyCache, AnyMemory, ModelMaker, RealMaker
from tests.simulation.process import Process
from tests.simulation.real_memory import RECORD_BYTES as REAL_RECORD_BYTES
from tests.simulation.server_machine import Machine, Server
from tests.simulation.tier_model import Disk
from tests.simulation.timeline import MILLISECOND_NS, SECOND_NS, Timeline

RECORD_BYTES = 32
SETTINGS = (
    LinkSettings(call_deadline_s=0.3, join_deadline_s=0.5, rejoin_after_s=1.5, last_backoff_s=0.5, stock_slots=(8,)),
    LinkSettings(stock_slots=(8,)),
    LinkSettings(join_deadline_s=0.1, rejoin_after_s=0.2, last_backoff_s=0.1),
)
TIER_CYCLE, TIER_SEEDS = 5, (1, 3)
"""Seeds that have a slower tier. The other schedules are the same as before there was one."""
HEALED_WITHIN_NS = 60 * SECOND_NS
AnyProcess = TypeVar("AnyProcess", bound=Process)


class Engine:
    """The processes of one engine, one run after the other."""

    def __init__(self, world: World, number: int, register: Register, workers: int) -> None:
        self._world = world
        self._number = number
        self._register = register
        self._count = workers
        self._name = f"engine{number}"
        self.workers: list[Worker] = []
        self.start()

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]

    def start(self) -> None:
        """Restarts all of its processes, sometimes under another name."""
        if self._world.timeline.chance(0.2):
            self._name = f"engine{self._number}-{self._world.draw_number()}"
        self.workers = [self._make_worker(rank) for rank in range(self._count)]
        self.scheduler = self._make_scheduler()

    def crash(self) -> None:
        timeline = self._world.timeline
        for process in self.processes:
            timeline.after(timeline.between_ms(0.01, 20), process.crash)
        timeline.after(timeline.between_ms(20, 800), self.start)

    def replace(self, process: Process) -> None:
        """It has crashed alone, and comes back."""
        if process is self.scheduler:
            self.scheduler = self._make_scheduler()
        elif process in self.workers:
            self.workers[self.workers.index(process)] = self._make_worker(process.rank)
            self.scheduler.workers = self.workers

    def _make_worker(self, rank: int) -> Worker:
        settings = replace(self._world.settings, stock_slots=())
        return self._world.add(Worker(self._world, self._name, Role.WORKER, rank, self._register, settings)).start()

    def _make_scheduler(self) -> Scheduler:
        made = Scheduler(self._world, self._name, Role.SCHEDULER, 0, self._register, self._world.settings)
        made.start(self.workers)
        return self._world.add(made)


class World:
    """`run` raises AssertionError where something happens that must not."""

    def __init__(self, seed: int, *, traces: bool = False, codes: bool = False, is_real: bool = False) -> None:
        """`codes`: messages travel as the bytes that they are on a real wire. `is_real`: on the native cache."""
        self.timeline = timeline = Timeline(seed, traces=traces)
        self.codes = codes
        self.ledger = Ledger()
        self.memories: dict[int, AnyMemory] = {}
        self.express_ends: dict[int, Connection] = {}
        """Express channels on their way to their processes, by descriptor."""
        self.processes: list[Process] = []
        self.is_busy = True
        self.is_lossy = timeline.chance(0.3)
        self._numbers = count(1)
        self._fault_rate = timeline.random.choice((0.002, 0.01, 0.03))
        self.settings = timeline.random.choice(SETTINGS)
        slots = timeline.random.choice((12, 24, 40))
        workers = timeline.random.choice((1, 1, 2))
        self.disk = Disk() if seed % TIER_CYCLE in TIER_SEEDS and not is_real else None
        """Below memory, whichever server runs; None: there is none."""
        self._maker = RealMaker(workers) if is_real else ModelMaker(slots, self.has_exited)
        self.machine = Machine(self)
        self.engines: list[Engine] = []
        names = timeline.random.choice((("a",), ("a", "a"), ("a", "b")))
        for number, name in enumerate(names):
            register = make_register(name, workers, REAL_RECORD_BYTES if is_real else RECORD_BYTES)
            self.engines.append(Engine(self, number, register, workers))
        self._ends_by_drain = timeline.chance(0.2)
        self._busy_ns = timeline.between_ms(100, 1200)

    @property
    def schedulers(self) -> list[Scheduler]:
        return [process for process in self.living if isinstance(process, Scheduler)]

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    def run(self) -> None:
        self._operate()
        self.timeline.run_until(self.timeline.now_ns + self._busy_ns)
        self._heal()
        self._settle()
        self._check_end()
        if self._ends_by_drain:
            self._check_drain()

    def close(self) -> None:
        self._maker.close()

    # ---- what others ask ----

    def add(self, process: AnyProcess) -> AnyProcess:
        self.processes.append(process)
        return process

    def draw_number(self) -> int:
        """Draws the number of a process or a connection."""
        return next(self._numbers)

    def create_memory(self) -> tuple[AnyMemory, AnyCache]:
        cache = self._maker.create(len(self.memories) + 1)
        self.memories[cache.memory.number] = cache.memory
        return cache.memory, cache

    def adopt(self, memory: AnyMemory) -> AnyCache:
        return self._maker.adopt(memory)

    def has_exited(self, pid: int) -> bool:
        """Whether a process has exited, by its pidfd."""
        return pid in self.ledger.exited

    def exit_server(self, pid: int) -> None:
        """Its tier's threads have ended with it; soon its pidfd reports."""
        self.timeline.after(self.timeline.between_ms(0.01, 60), self.ledger.exited.add, pid)

    def exit_process(self, process: Process) -> None:
        """It has crashed, and its lifeline has ended: soon its pidfd reports."""
        self.timeline.after(self.timeline.between_ms(0.01, 60), self._exit, process)

    def _exit(self, process: Process) -> None:
        self.timeline.note(process.name, "has exited")
        self._maker.exit_process(process.pid)
        self.ledger.exited.add(process.pid)
        if isinstance(process, Worker):
            process.end_copies()
            for scheduler in self.schedulers:
                scheduler.on_worker_exit(process)

    def has_fault(self, _kind: str, probability: float) -> bool:
        """Whether the wire fails a message now: loses, repeats or reorders it, or is full."""
        return self.is_busy and self.timeline.chance(probability)

    def may_fail_here(self, who: Process | Server) -> bool:
        """Something may happen whenever a message arrives. True: who was to have it is not there any more."""
        if self.is_busy and self.timeline.chance(self._fault_rate):
            inject_fault(self, who)
        return not who.is_alive

    # ---- the course of things ----

    def _operate(self) -> None:
        """Starts a server if there is none, as an operator would."""
        if self.machine.listener is None:
            self.machine.start()
        if self.is_busy:
            self.timeline.after(self.timeline.between_ms(20, 800), self._operate)

    def _heal(self) -> None:
        """Heals the world: nothing happens any more that should not."""
        self.timeline.note("world", "HEALS")
        self.is_busy = False
        for process in self.processes:
            process.go_on()
        server = self.machine.listener
        if server is not None:
            server.go_on()
            if server.is_draining:
                server.kill()
        self._operate()

    def _settle(self) -> None:
        """In the end everybody is served, and nothing is under way."""
        until_ns = self.timeline.now_ns + HEALED_WITHIN_NS
        while True:
            self.timeline.run_until(self.timeline.now_ns + 200 * MILLISECOND_NS)
            self._operate()
            # A process may outlive its engine: it came back alone while the others were about to restart.
            members = [process for engine in self.engines for process in engine.processes]
            awaited = dict.fromkeys([*members, *self.living])
            unserved = [process.name for process in awaited if not process.is_answered()]
            working = [scheduler.name for scheduler in self.schedulers if not scheduler.is_idle]
            # Also what workers do for a scheduler that has crashed.
            working += [one.name for one in self.living if isinstance(one, Worker) and one.copies]
            moves = self.machine.listener is not None and self.machine.listener.moves_blocks
            if not (unserved or working or moves):
                break
            found = f"not served {unserved}, busy {working}, traffic with the tier: {moves}"
            assert self.timeline.now_ns < until_ns, f"long after all was well: {found}"
        # Time for answers without a waiting caller, and for two ticks. Slots that no save takes go back, and others may
        # get them; what was sent at the end of a look arrives before the next one.
        self.timeline.run_until(self.timeline.now_ns + SECOND_NS)
        quiet_looks = 0
        while quiet_looks < 2:
            self.timeline.run_until(self.timeline.now_ns + 200 * MILLISECOND_NS)
            stocks = [stock for scheduler in self.schedulers for stock in scheduler.blocks.stocks]
            is_moving = any(stock.is_asking or len(stock) > stock.high for stock in stocks)
            quiet_looks = 0 if is_moving else quiet_looks + 1
            assert self.timeline.now_ns < until_ns, "long after all was well slots still move"

    def _check_end(self) -> None:
        memory = self.machine.listener.memory if self.machine.listener is not None else None
        assert memory is not None, "there is no server"
        stocks: set[int] = set()
        for scheduler in self.schedulers:
            assert scheduler.link.is_serving, f"{scheduler.name} is not served any more: {scheduler.link.fault}"
            assert scheduler.blocks.memory_id == memory.number
            assert len(scheduler.link.memories) == 1, f"{scheduler.name} keeps memory that nobody uses"
            assert not stocks & scheduler.stock, "a slot is in two stocks"
            stocks |= scheduler.stock
        self.ledger.check_leases(memory)
        self.ledger.check_slots(memory, stocks)
        assert not +self.ledger.writers, "copies that never ended"
        assert not +self.ledger.readers, "copies that never ended"

    def _check_drain(self) -> None:
        """Checks that only slots held ready are held."""
        server = self.machine.listener
        assert server is not None
        server.drain()
        self.timeline.run_until(self.timeline.now_ns + SECOND_NS)
        assert not server.is_alive or self.ledger.lost, "a drained server waits for what nobody needs"


def make_register(name: str, workers: int, record_bytes: int) -> Register:
    group = GroupTerms(record_bytes=record_bytes, block_size=TOKENS, reuse=ReuseRule.PREFIX, window=0, shards=workers)
    return Register(
        fingerprint=fingerprint(name), hash_algorithm="sha256", hash_seed=b"", hash_block_size=TOKENS, groups=(group,)
    )
