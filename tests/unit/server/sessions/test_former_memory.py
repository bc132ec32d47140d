"""Memory of former servers: counted once, asked for when it is unused, and not taken twice from the machine."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffload import server as server_package
from kvoffload.cache import Ask, CacheSettings, LocalCache, Publication
from kvoffload.client import Client, ClientSettings, LinkSettings, Member
from kvoffload.protocol import FormerMemory, Holding, Retire, Role
from kvoffload.server import DomainSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN, make_chain
from tests.kit.instructions import Instructions
from tests.kit.server.harness import Client as Process
from tests.kit.server.harness import Server, register_of

WAIT_S = 60.0
OWN, OLD, OLDER = 7, 8, 9
CHAIN = make_chain(1, 1)
PATIENT = LinkSettings(acquire_deadline_s=WAIT_S, call_deadline_s=WAIT_S)
POOL = CacheSettings(
    memory_bytes=64 * MIB, segment_bytes=32 * MIB, extent_bytes=MIB, entry_limit=4096, step_bytes=8 * MIB, threads=1
)


def holding(*memories: int) -> Holding:
    return Holding(memories=tuple(FormerMemory(memory=one, size_bytes=100 + one) for one in memories))


def tell(process: Process, *memories: int) -> None:
    process.server.deliver(process.server.core.hear_holding(process.lifeline, holding(*memories)))


def asked_of(process: Process) -> list[list[int]]:
    told = process.server.told.get(process.lifeline, [])
    return [np.frombuffer(one.memories, "<u8").tolist() for one in told if isinstance(one, Retire)]


def test_each_memory_counts_once_and_the_servers_own_does_not(server: Server) -> None:
    first, second = server.process("one").join(), server.process("two", role=Role.WORKER).join()
    assert server.core.count_former("main", OWN) == 0
    tell(first, OLD, OWN)
    tell(second, OLD, OLDER)
    assert server.core.count_former("main", OWN) == 100 + OLD + 100 + OLDER
    tell(second, OLD)
    assert server.core.count_former("main", OWN) == 100 + OLD
    assert server.core.count_former("another", OWN) == 0


def test_memory_of_a_process_that_has_ended_counts_no_more(server: Server) -> None:
    first, second = server.process("one").join(), server.process("two").join()
    tell(first, OLD)
    tell(second, OLD)
    server.exit_process(first)
    assert server.core.count_former("main", OWN) == 100 + OLD
    server.exit_process(second)
    assert server.core.count_former("main", OWN) == 0


def test_a_memory_counts_with_the_largest_size_that_is_named(server: Server) -> None:
    processes = [server.process(name).join() for name in ("one", "two", "three")]
    for process, size_bytes in zip(processes, (10, 30, 20), strict=True):
        told = Holding(memories=(FormerMemory(memory=OLD, size_bytes=size_bytes),))
        process.server.deliver(process.server.core.hear_holding(process.lifeline, told))
    counts = [server.core.count_former("main", OWN)]
    for process in (processes[1], processes[0], processes[2]):
        tell(process)
        counts.append(server.core.count_former("main", OWN))
    assert counts == [30, 20, 20, 0]


def test_what_many_processes_have_makes_the_count_no_more_work(server: Server) -> None:
    counts = []
    for number in range(24):
        process = server.process(f"engine {number}").join()
        tell(process, *range(100 * number, 100 * number + 64))
        spent = Instructions(server_package)
        with spent.counted():
            server.core.count_former("main", OWN)
        counts.append(spent.count)
    assert counts[0] == counts[-1] > 0


def test_a_worker_is_asked_when_its_scheduler_holds_nothing_there(server: Server) -> None:
    scheduler = server.process().join()
    workers = [server.process(role=Role.WORKER).join() for _ in range(2)]
    tell(workers[0], OLD, OLDER)
    assert asked_of(workers[0]) == []  # the scheduler has said nothing
    tell(scheduler, OLD, OLDER)
    assert asked_of(workers[0]) == []
    tell(scheduler, OLDER)
    assert asked_of(workers[0]) == [[OLD]]
    tell(workers[1], OLD, OLDER)
    assert asked_of(workers[1]) == [[OLD]]
    tell(scheduler)
    assert [asked_of(worker) for worker in workers] == [[[OLD], [OLD, OLDER]]] * 2
    assert asked_of(scheduler) == []


def test_nobody_is_asked_twice_unless_it_has_told_anew(server: Server) -> None:
    scheduler, worker = server.process().join(), server.process(role=Role.WORKER).join()
    tell(worker, OLD)
    for _ in range(3):
        tell(scheduler)
    assert asked_of(worker) == [[OLD]]
    tell(worker, OLD)  # what came while it joined it could not do
    assert asked_of(worker) == [[OLD]] * 2


def test_an_engine_without_a_scheduler_and_another_engine_are_asked_for_nothing(server: Server) -> None:
    alone, other = server.process("one", role=Role.WORKER).join(), server.process("two").join()
    tell(alone, OLD)
    tell(other)
    assert asked_of(alone) == []


def test_nobody_is_asked_before_there_is_memory_to_go_on_with() -> None:
    with Server(memory=None) as server:
        scheduler, worker = server.process(), server.process(role=Role.WORKER)
        scheduler.greet()
        worker.greet()
        tell(scheduler)
        tell(worker, OLD)
        assert asked_of(worker) == []


def test_what_a_stranger_tells_is_nothing(server: Server) -> None:
    assert server.core.hear_holding(12345, holding(OLD)) == []
    assert server.core.count_former("main", OWN) == 0


# ---- with real memory ----


def await_that(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


@contextmanager
def serving(plan: ServerPlan, clock_ns: Callable[[], int] = time.monotonic_ns) -> Iterator[CacheServer]:
    """Gone like one that was killed: engines are not told."""
    server, is_over = CacheServer(plan, clock_ns=clock_ns), threading.Event()

    def run() -> None:
        while not is_over.is_set():
            server.turn(0.01)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        server.close()


@contextmanager
def joined(path: Path, role: Role) -> Iterator[Client]:
    member = Member(engine="engine", role=role)
    with Client(ClientSettings(socket=path, member=member, register=register_of(PLAIN), link=PATIENT)) as client:
        assert client.wait_until_served(WAIT_S)
        yield client


def cache_of(server: CacheServer) -> LocalCache:
    return server.pools.caches[""]


def test_a_server_with_new_memory_does_not_double_what_its_engines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has nothing to do meanwhile: no step of it retires anything."""
    path = tmp_path / "s"
    with ExitStack() as first, ExitStack() as engine:
        server = first.enter_context(serving(ServerPlan(socket=path, memory={"": POOL})))
        scheduler, worker = (engine.enter_context(joined(path, role)) for role in (Role.SCHEDULER, Role.WORKER))
        await_that(lambda: cache_of(server).ready_bytes == POOL.memory_bytes)
        former = [weakref.ref(one.memory(one.memory_id)) for one in (scheduler, worker)]
        assert scheduler.publish(Publication(scheduler.reserve(0, hashes=CHAIN), hashes=CHAIN))
        scheduler.stats()  # the publish was served before it
        lease = scheduler.acquire(Ask(CHAIN)).lease
        assert lease is not None
        first.close()
        grow, peaks = LocalCache.grow, [0]

        def count(cache: LocalCache) -> None:
            is_former = any(segments() is not None for segments in former)
            peaks.append(cache.ready_bytes + is_former * POOL.memory_bytes)

        def grow_counted(cache: LocalCache, _keep_free_bytes: int) -> bool:
            count(cache)
            is_growing = grow(cache)
            count(cache)
            return is_growing

        monkeypatch.setattr(LocalCache, "grow", grow_counted)
        plan = ServerPlan(
            socket=path,
            memory={"": POOL},
            # Memory of this size is never adopted.
            domains=(DomainSettings(name="", memory_bytes=1),),
            adopt_wait_s=3600.0,
        )
        later_s = [0]
        with serving(plan, lambda: time.monotonic_ns() + later_s[0] * 1_000_000_000) as second:
            await_that(lambda: second.core.count_former("", 0) == POOL.memory_bytes)
            # A process that greets after the jump would have another clock than the server.
            await_that(lambda: all(client.wire.control_file >= 0 for client in (scheduler, worker)))
            later_s[0] = 3600
            for client in (scheduler, worker):
                assert client.wait_until_served(WAIT_S)
            assert len(scheduler.places()) == len(worker.places()) == 2
            assert cache_of(second).ready_bytes == POOL.step_bytes
            scheduler.release(lease)
            await_that(lambda: cache_of(second).ready_bytes == POOL.memory_bytes)
            assert [segments() for segments in former] == [None, None]
            assert max(peaks) <= POOL.memory_bytes + POOL.step_bytes
