"""Which session a process belongs to, what survives its end, and what frees memory: exits alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvoffload.cache import NO_LIMIT, LocalCache, SessionId
from kvoffload.protocol import Bye, Credits, Done, Error, ErrorCode, Greeting, Prefetch, Role, Stats, Welcome
from kvoffload.server import DomainSettings, Peer, ServerLimits
from tests.kit.cache.cache_model import HYBRID, SMALL, fingerprint
from tests.kit.children import child
from tests.kit.server.harness import (
    BOOT_ID,
    UID,
    CacheWithoutProcesses,
    Client,
    FakePidfd,
    Server,
    register_of,
)


def reserve(client: Client, count: int = 2) -> None:
    assert len(client.ask(Credits(name_space=client.name_space, group=0, count=count)).tickets) == 8 * count


def test_a_closed_lifeline_frees_nothing_and_the_exit_does(server: Server) -> None:
    engine = server.process().join()
    reserve(engine)
    server.core.close_lifeline(engine.lifeline)
    server.core.tick()
    assert (len(server.core.sessions), server.cache.stats.reserved) == (1, 2)
    answer = engine.ask(Stats())
    assert answer.code is ErrorCode.NO_SESSION
    server.exit_process(engine)
    assert (len(server.core.sessions), server.cache.stats.reserved) == (0, 0)


def test_a_session_has_parted_when_all_its_processes_said_so_and_are_gone(server: Server) -> None:
    first, second = server.process().join(), server.process().join()
    (session,) = server.core.sessions
    for engine in (first, second):
        assert isinstance(engine.ask(Bye(one_way_count=0)), Done)
        assert not session.has_parted
        server.core.close_lifeline(engine.lifeline)
    assert session.has_parted


def test_a_process_that_ends_without_a_word_has_not_parted(server: Server) -> None:
    first, second = server.process().join(), server.process().join()
    (session,) = server.core.sessions
    assert isinstance(first.ask(Bye(one_way_count=0)), Done)
    for engine in (first, second):
        server.core.close_lifeline(engine.lifeline)
    assert not session.has_parted


def test_memory_is_kept_until_the_last_process_has_exited(server: Server) -> None:
    first, second = server.process().join(), server.process().join()
    reserve(first)
    server.exit_process(first)
    assert server.cache.stats.reserved == 2
    reserve(second, 1)
    server.exit_process(second)
    assert server.cache.stats.reserved == 0


def test_an_engine_comes_back_to_what_it_held(server: Server) -> None:
    engine = server.process().join()
    reserve(engine)
    number = engine.session
    server.core.close_lifeline(engine.lifeline)
    welcome = engine.greet(former_session=number, former_boot_id=BOOT_ID)
    assert isinstance(welcome, Welcome)
    assert (welcome.session, welcome.is_reopened) == (number, True)
    engine.connect()
    engine.ask(register_of())
    reserve(engine)
    assert server.cache.stats.reserved == 4


@pytest.mark.parametrize("former", [(0, 0), (1, BOOT_ID), (None, BOOT_ID + 1)])
def test_a_new_process_of_the_same_name_is_another_session(server: Server, former: tuple[int | None, int]) -> None:
    engine = server.process().join()
    server.core.close_lifeline(engine.lifeline)
    number, boot_id = former
    successor = server.process()
    welcome = successor.greet(former_session=engine.session if number is None else number, former_boot_id=boot_id)
    assert isinstance(welcome, Welcome)
    assert not welcome.is_reopened
    assert welcome.session != engine.session
    assert len(server.core.sessions) == 2


def test_nobody_else_reopens_a_session(server: Server) -> None:
    engine = server.process().join()
    server.core.close_lifeline(engine.lifeline)
    for thief in (server.process("thief"), server.process(uid=UID + 1)):
        welcome = thief.greet(former_session=engine.session, former_boot_id=BOOT_ID)
        assert isinstance(welcome, Welcome)
        assert (welcome.is_reopened, welcome.session != engine.session) == (False, True)


def test_another_user_is_another_engine(server: Server) -> None:
    assert server.process(uid=1).join().session != server.process(uid=2).join().session


def test_a_dead_engine_is_not_joined_though_its_lifeline_is_open(server: Server) -> None:
    engine = server.process().join()
    reserve(engine)
    server.cache.exited.add(engine.pidfd.number)
    successor = server.process().join()
    assert successor.session != engine.session
    assert (len(server.core.sessions), server.cache.stats.reserved) == (1, 0)


def test_a_second_greeting_on_a_lifeline_is_a_new_process(server: Server) -> None:
    engine = server.process().join()
    reserve(engine)
    assert isinstance(engine.greet(is_new=False), Welcome)
    sessions = list(server.core.sessions)
    assert [session.is_open for session in sessions] == [False, True]
    assert [len(session.processes) for session in sessions] == [0, 1]


def test_the_bounds_are_said() -> None:
    with Server(limits=ServerLimits(sessions=2, session_processes=2)) as server:
        server.process("a").join()
        server.process("a").join()
        full = server.process("a")
        answer = full.greet()
        assert isinstance(answer, Error)
        assert (answer.code, answer.retryable, full.pidfd.is_closed) == (ErrorCode.BUSY, True, True)
        server.process("b").join()
        server.core.close_lifeline(full.lifeline)
        answer = server.process("c").greet()
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.BUSY


def test_a_greeting_needs_a_pidfd(server: Server) -> None:
    engine = server.process()
    greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER)
    answer = server.greet(greeting, lifeline=engine.lifeline, peer=Peer(pid=1, uid=UID), pidfd=None)
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.MALFORMED
    forged = FakePidfd(-1)
    answer = server.greet(greeting, lifeline=engine.lifeline, peer=Peer(pid=1, uid=UID), pidfd=forged)
    assert isinstance(answer, Error)
    assert answer.code is ErrorCode.MALFORMED
    server.core.tick()
    assert (len(server.core.sessions), server.cache.stats.sessions) == (0, 0)


def test_a_session_that_cannot_be_had_leaves_nothing_behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("there are 4096 sessions")

    monkeypatch.setattr(server.cache, "open_session", fail)
    engine = server.process()
    answer = engine.greet()
    assert isinstance(answer, Error)
    assert (answer.code, engine.pidfd.is_closed) == (ErrorCode.INTERNAL, True)
    assert len(server.core.sessions) == 0


# ---- memory that comes later ----


def test_processes_that_came_first_get_the_memory_when_it_is_there() -> None:
    with Server(memory=None) as server:
        first, second = server.process(), server.process()
        assert isinstance(first.greet(), Welcome)
        assert isinstance(second.greet(), Welcome)
        gone = server.process("gone")
        gone.greet()
        server.core.close_lifeline(gone.lifeline)
        assert gone.pidfd.is_closed
        cache = CacheWithoutProcesses.create(SMALL)
        server.attach("main", cache)
        assert [sent.lifeline for sent in server.memory_sent] == [first.lifeline, second.lifeline]
        (members,) = cache.members.values()
        assert members == {first.pidfd.number, second.pidfd.number}
        first.connect()
        assert not isinstance(first.ask(register_of()), Error)


def test_a_forged_pidfd_that_had_to_wait_costs_its_session() -> None:
    with Server(memory=None) as server:
        engine = server.process()
        engine.pidfd.number = -1
        engine.greet()
        server.attach("main", CacheWithoutProcesses.create(SMALL))
        assert [session.is_open for session in server.core.sessions] == [False]
        assert server.memory_sent == []
        server.core.tick()
        assert len(server.core.sessions) == 0


def test_a_session_that_adopted_memory_has_no_place_for_ends_alone() -> None:
    class Full(CacheWithoutProcesses):
        def open_session(self, *, held_limit_bytes: int = NO_LIMIT, owner: int | None = None) -> SessionId:
            if len(self.members) == 1:
                raise RuntimeError("there are too many sessions")
            return super().open_session(held_limit_bytes=held_limit_bytes, owner=owner)

    with Server(memory=None) as server:
        first, second = server.process("a"), server.process("b")
        first.greet()
        second.greet()
        server.attach("main", Full.create(SMALL))
        assert [sent.lifeline for sent in server.memory_sent] == [first.lifeline]
        assert len(server.core.sessions) == 1
        assert second.pidfd.is_closed


def test_a_session_that_breaks_before_the_memory_is_there_holds_nothing() -> None:
    with Server(memory=None) as server:
        engine = server.process()
        engine.greet()
        engine.connect()
        engine.tell(Prefetch(name_space=0, chain=b""), number=2)
        assert (len(server.core.sessions), engine.pidfd.is_closed) == (0, True)
        server.attach("main", CacheWithoutProcesses.create(SMALL))
        welcome = engine.greet(former_session=engine.session, former_boot_id=BOOT_ID)
        assert isinstance(welcome, Welcome)
        assert not welcome.is_reopened


OLD_BOOT = 0x01D


@pytest.fixture
def adopted() -> Iterator[CacheWithoutProcesses]:
    """A cache as an old server left it: one session of it holds two slots."""
    with CacheWithoutProcesses.create(SMALL) as cache:
        name_space = cache.open_namespace(fingerprint("model"), HYBRID)
        old = cache.open_session()
        cache.add_process(old, pidfd=1000)
        cache.reserve(old, name_space, 0, count=2)
        cache.quarantine_session(old)
        yield cache


@pytest.mark.parametrize("is_before", [True, False])
def test_a_session_of_adopted_memory_goes_on(adopted: CacheWithoutProcesses, is_before: bool) -> None:
    """Whether its engine greets before the memory is there, or after."""
    (old,) = adopted.members
    server = Server(memory=None)
    engine = server.process()
    former = {"former_session": (0xABC << 32) + old, "former_boot_id": OLD_BOOT}
    if is_before:
        assert not engine.greet(**former).is_reopened  # type: ignore[union-attr]
    server.attach("main", adopted, adopted_boot_id=OLD_BOOT)
    if not is_before:
        assert engine.greet(**former).is_reopened  # type: ignore[union-attr]
    assert [sent.adopted_boot_id for sent in server.memory_sent] == [OLD_BOOT]
    (session,) = server.core.sessions
    assert session.cache_session == old
    # The next one of the engine belongs to it as well.
    assert server.process().greet(**former).is_reopened  # type: ignore[union-attr]


def test_an_adopted_session_is_found_after_its_first_process_has_gone(adopted: CacheWithoutProcesses) -> None:
    (old,) = adopted.members
    server = Server(memory=None)
    server.attach("main", adopted, adopted_boot_id=OLD_BOOT)
    former = {"former_session": (0xABC << 32) + old, "former_boot_id": OLD_BOOT}
    first = server.process()
    assert first.greet(**former).is_reopened  # type: ignore[union-attr]
    server.core.close_lifeline(first.lifeline)
    assert not server.process("other").greet(**former).is_reopened  # type: ignore[union-attr]
    assert server.process().greet(**former).is_reopened  # type: ignore[union-attr]
    assert [session.cache_session == old for session in server.core.sessions] == [True, False]


@pytest.mark.parametrize("boot_id", [0, OLD_BOOT + 1])
def test_a_session_of_other_memory_is_not_mistaken_for_it(adopted: CacheWithoutProcesses, boot_id: int) -> None:
    (old,) = adopted.members
    server = Server(memory=None)
    server.attach("main", adopted, adopted_boot_id=OLD_BOOT)
    assert not server.process().greet(former_session=old, former_boot_id=boot_id).is_reopened  # type: ignore
    (session,) = server.core.sessions
    assert session.cache_session != old


def test_two_engines_do_not_share_an_adopted_session(adopted: CacheWithoutProcesses) -> None:
    (old,) = adopted.members
    server = Server(memory=None)
    server.attach("main", adopted, adopted_boot_id=OLD_BOOT)
    for name, is_first in (("a", True), ("b", False)):
        welcome = server.process(name).greet(former_session=old, former_boot_id=OLD_BOOT)
        assert welcome.is_reopened is is_first  # type: ignore[union-attr]


# ---- real processes ----


class RealPidfd:
    """A pidfd in the form in which the sockets hand it in."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self) -> int:
        number, self.number = self.number, -1
        return number

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.take())


def test_the_kernels_word_frees_memory() -> None:
    server = Server(memory=None)
    with LocalCache.create(SMALL) as cache, child(["-c", "import time; time.sleep(1000)"]) as process:
        server.attach("main", cache)
        engine = server.process()
        greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.SCHEDULER, wants_express=True)
        pidfd = RealPidfd(os.pidfd_open(process.pid))
        peer = Peer(pid=process.pid, uid=UID)
        welcome = server.greet(greeting, lifeline=engine.lifeline, peer=peer, pidfd=pidfd)  # type: ignore[arg-type]
        assert isinstance(welcome, Welcome)
        assert pidfd.number == -1
        engine.session = welcome.session
        engine.connect()
        engine.name_space = engine.ask(register_of()).name_space
        reserve(engine)
        server.core.close_lifeline(engine.lifeline)
        server.core.tick()
        assert cache.stats.reserved == 2
        process.kill()
        process.wait()
        server.core.tick()
        assert (cache.stats.reserved, len(server.core.sessions)) == (0, 0)


def test_a_closed_descriptor_is_no_pidfd_of_a_real_cache() -> None:
    server = Server(memory=None)
    read, write = os.pipe()
    with LocalCache.create(SMALL) as cache:
        server.attach("main", cache)
        greeting = Greeting(protocol_min=1, protocol_max=1, engine="engine", role=Role.WORKER)
        pipe = RealPidfd(read)
        answer = server.greet(greeting, lifeline=1, peer=Peer(pid=1, uid=UID), pidfd=pipe)  # type: ignore[arg-type]
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.MALFORMED
        server.core.tick()
        assert cache.stats.sessions == 0
    os.close(write)


def leave(client: Client) -> None:
    """The lifeline ends, and the process lives on."""
    client.server.core.close_lifeline(client.lifeline)


class Process:
    """One that greets again and again, each time as another engine."""

    def __init__(self, server: Server, *, uid: int = UID) -> None:
        self.client = server.process("first", uid=uid)
        self.pid = self.client.lifeline
        self.count = 0

    def greet(self) -> object:
        self.count += 1
        self.client.engine = f"engine {self.count}"
        self.client.lifeline = next(self.client.server.numbers)
        self.client.pidfd = FakePidfd(self.client.pidfd.number)
        greeting = Greeting(
            protocol_min=1, protocol_max=1, engine=self.client.engine, role=Role.WORKER, wants_express=True
        )
        answer = self.client.server.greet(
            greeting,
            lifeline=self.client.lifeline,
            peer=Peer(pid=self.pid, uid=self.client.uid),
            pidfd=self.client.pidfd,
        )
        if isinstance(answer, Welcome):
            self.client.session = answer.session
        return answer


def test_a_process_that_greets_anew_gives_back_the_session_in_which_it_holds_nothing() -> None:
    with Server(limits=ServerLimits(sessions=4)) as server:
        process = Process(server)
        numbers = set()
        for _ in range(10):
            welcome = process.greet()
            assert isinstance(welcome, Welcome)
            assert not welcome.is_reopened
            numbers.add(welcome.session)
            assert len(server.core.sessions) == 1
            leave(process.client)
        # Facts about a former session do not count for this one.
        assert len(numbers) == 10
        assert server.cache.stats.sessions == 1
        server.exit_process(process.client)
        assert (len(server.core.sessions), server.cache.stats.sessions) == (0, 0)


def test_the_session_in_which_it_holds_something_stays() -> None:
    with Server(limits=ServerLimits(sessions=8)) as server:
        process = Process(server)
        assert isinstance(process.greet(), Welcome)
        process.client.connect()
        process.client.name_space = process.client.ask(register_of()).name_space
        reserve(process.client)
        former = process.client.session
        leave(process.client)
        assert isinstance(process.greet(), Welcome)
        assert (len(server.core.sessions), server.cache.stats.reserved) == (2, 2)
        leave(process.client)
        process.client.engine = "engine 1"
        welcome = process.client.greet(former_session=former, former_boot_id=BOOT_ID)
        assert isinstance(welcome, Welcome)
        assert (welcome.session, welcome.is_reopened) == (former, True)


def test_another_process_does_not_get_it() -> None:
    with Server(limits=ServerLimits(sessions=8)) as server:
        process, other = Process(server), Process(server)
        assert isinstance(process.greet(), Welcome)
        leave(process.client)
        assert isinstance(other.greet(), Welcome)
        assert len(server.core.sessions) == 2


def test_of_an_engine_of_several_processes_it_stays() -> None:
    with Server(limits=ServerLimits(sessions=8)) as server:
        process = Process(server)
        assert isinstance(process.greet(), Welcome)
        other = server.process("engine 1").join()
        leave(process.client)
        leave(other)
        assert isinstance(process.greet(), Welcome)
        assert len(server.core.sessions) == 2


def test_no_user_gets_all_sessions() -> None:
    with Server(limits=ServerLimits(sessions=8)) as server:
        greeted = [server.process(f"engine {at}", uid=1).greet() for at in range(9)]
        assert [isinstance(one, Welcome) for one in greeted] == [True] * 6 + [False] * 3
        assert isinstance(server.process("other", uid=2).greet(), Welcome)


def test_no_user_gets_all_sessions_of_a_domain() -> None:
    domains = (DomainSettings(name="red", uids=frozenset({1, 2})), DomainSettings(name="blue"))
    with Server(domains=domains, limits=ServerLimits(sessions=8)) as server:
        greeted = [server.process(f"engine {at}", uid=1, domain="red").greet() for at in range(9)]
        assert [isinstance(one, Welcome) for one in greeted] == [True] * 6 + [False] * 3
        for uid, domain in ((2, "red"), (3, "blue")):
            assert isinstance(server.process("other", uid=uid, domain=domain).greet(), Welcome)


def test_no_domain_gets_all_sessions() -> None:
    domains = (DomainSettings(name="red", uids=frozenset(range(20))), DomainSettings(name="blue"))
    with Server(domains=domains, limits=ServerLimits(sessions=8)) as server:
        greeted = [server.process(f"engine {uid}", uid=uid, domain="red").greet() for uid in range(9)]
        assert [isinstance(one, Welcome) for one in greeted] == [True] * 7 + [False] * 2
        assert isinstance(server.process("other", uid=100, domain="blue").greet(), Welcome)
