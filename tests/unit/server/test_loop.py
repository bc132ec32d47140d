"""The server with its real sockets and memory: saves, hits, ends, and what a killed one leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # loaded by numpy at its first use, when a test's process may be another user who cannot read it
import pytest
import zmq

from kvoffload import native
from kvoffload.cache import TENANT_LIMIT, CacheSettings, LocalCache
from kvoffload.errors import ConfigError, PacketError
from kvoffload.protocol import (
    CODEC,
    Acquire,
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Bye,
    Channel,
    ClientMessage,
    Counts,
    Done,
    Drain,
    Draining,
    Error,
    ErrorCode,
    Farewell,
    Offer,
    Prefetch,
    Quarantine,
    Release,
    Stats,
)
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.channels.control import ControlSocket
from kvoffload.server.channels.unix_listener import UnixListener
from kvoffload.server.loop import SWITCH_S, CacheServer, ServerPlan
from kvoffload.types import AcquireOutcome
from kvoffload.units import KIB, MIB
from tests.kit.children import child
from tests.kit.server.blocks import MEMORY, RECORD_BYTES, acquire, connect, hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient

SERVER = """
import sys
from pathlib import Path
from kvoffload import native
from kvoffload.cache import CacheSettings, LocalCache
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.loop import CacheServer, ServerPlan
settings = CacheSettings(memory_bytes=int(sys.argv[2]), segment_bytes=int(sys.argv[2]))
named = (one.split("=") for one in sys.argv[3:])
tenants = tuple(TenantSettings(name=name, quota_bytes=int(quota)) for name, quota in named)
domain = DomainSettings(name="", tenants=tenants)
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": settings}, domains=(domain,)))
print("serves", flush=True)
server.run()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    yield server
    server.close()
    # The lock's file stays where an engine was there to the end: the next server reads whose memory that has.
    assert [file for file in tmp_path.iterdir() if file.suffix != ".lock"] == []


def test_what_one_engine_saves_another_hits(server: CacheServer, tmp_path: Path) -> None:
    first, second = (connect(server, tmp_path, engine=name) for name in ("first", "second"))
    hashes = hashes_of(5)
    assert not first.index.lookup(first.name_space, 0, hashes).any()
    save(first, hashes, 7)
    assert second.name_space == first.name_space
    assert second.index.lookup(second.name_space, 0, hashes).all()
    hit = acquire(second, hashes + hashes_of(2, seed=9))
    assert (hit.outcome, hit.boundary) == (AcquireOutcome.HIT, 80)
    addresses = np.frombuffer(hit.groups[0].addresses, "<u8").tolist()
    assert len(addresses) == 5
    for address in addresses:
        assert set(second.segments.view(address, RECORD_BYTES).tolist()) == {7}
    counts = second.ask(Stats())
    assert isinstance(counts, Counts)
    assert (counts.leases, counts.sessions, counts.hits) == (1, 2, 1)
    second.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))
    counts = second.ask(Stats())
    assert isinstance(counts, Counts)
    assert counts.leases == 0
    assert second.ask(Bye(one_way_count=0)) == Done()
    first.close()
    second.close()


def test_a_process_that_says_farewell_is_let_go(server: CacheServer, tmp_path: Path) -> None:
    client, other = connect(server, tmp_path), connect(server, tmp_path, engine="other")
    assert client.lifeline.send(CODEC.encode_call(Farewell(), number=1, channel=Channel.LIFELINE))
    with pytest.raises(PacketError, match="closed"):
        client.receive_event()
    assert isinstance(other.ask(Stats()), Counts)
    client.close()
    other.close()


def test_two_models_share_one_pool_and_nothing_else(server: CacheServer, tmp_path: Path) -> None:
    small, large = connect(server, tmp_path), connect(server, tmp_path, register_of(2, 3 * RECORD_BYTES), engine="l")
    hashes = hashes_of(3)
    save(small, hashes, 1)
    assert large.name_space != small.name_space
    assert acquire(large, hashes).outcome is AcquireOutcome.MISS
    assert acquire(small, hashes).outcome is AcquireOutcome.HIT
    small.close()
    large.close()


def test_a_different_geometry_is_refused_by_name(server: CacheServer, tmp_path: Path) -> None:
    first = connect(server, tmp_path)
    with pytest.raises(AssertionError, match=r"groups\[0\].record_bytes is 4096 here, 8192 there"):
        connect(server, tmp_path, register_of(record_bytes=8192), engine="other")
    first.close()


def test_one_way_messages_out_of_order_end_the_session(server: CacheServer, tmp_path: Path) -> None:
    client = connect(server, tmp_path)
    client.tell(Prefetch(name_space=client.name_space, chain=b""), number=2)
    assert isinstance(client.receive_event(), Quarantine)
    refused = client.ask(Stats())
    assert isinstance(refused, Error)
    assert refused.code in (ErrorCode.NO_SESSION, ErrorCode.OUT_OF_ORDER)
    client.close()


def test_nonsense_is_answered_and_harms_nobody(server: CacheServer, tmp_path: Path) -> None:
    client = connect(server, tmp_path)
    assert client.control is not None
    for frame in (b"", b"\xc1", b"x" * 100_000, b"\x94\x01\x01\x00\x00"):
        client.control.send(frame)
    for _ in range(20):
        server.turn(0.001)
    assert isinstance(client.ask(Stats()), Counts)
    client.close()


def test_threads_that_compute_give_way_to_the_loop(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(sys, "setswitchinterval", asked.append)
    server.stop()
    server.run()
    assert asked == [SWITCH_S]


def test_an_engine_that_dies_gives_back_what_it_held(server: CacheServer, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from kvoffload.protocol import Credits\n"
        "from tests.kit.server.blocks import register_of\n"
        "from tests.kit.server.raw_client import RawClient\n"
        "client = RawClient(sys.argv[1], register_of(), engine='dies')\n"
        "client.ask(Credits(name_space=client.name_space, group=0, count=9))\n"
        "print('holds', flush=True); sys.stdin.read()\n"
    )
    root = str(Path(__file__).parents[3])
    with child(["-c", script, str(tmp_path / "s"), root]) as engine:
        assert engine.stdout is not None
        os.set_blocking(engine.stdout.fileno(), False)
        while engine.stdout.readline() != "holds\n":
            server.turn(0.005)
            assert engine.poll() is None
        watcher = connect(server, tmp_path)
        counts = watcher.ask(Stats())
        assert isinstance(counts, Counts)
        assert counts.reserved == 9
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    for _ in range(1000):
        server.turn(0.005)
        counts = watcher.ask(Stats())
        assert isinstance(counts, Counts)
        if counts.reserved == 0:
            break
    assert (counts.reserved, counts.sessions) == (0, 1)
    watcher.close()


def test_a_server_that_is_stopped_ends_when_nobody_holds_anything(server: CacheServer, tmp_path: Path) -> None:
    client = connect(server, tmp_path)
    hashes = hashes_of(2)
    save(client, hashes, 3)
    hit = acquire(client, hashes)
    server.stop()
    for _ in range(5):
        assert server.turn(0.001)
    refused = client.ask(Acquire(name_space=client.name_space, chain=hashes))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.DRAINING
    client.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))
    for _ in range(1000):
        if not server.turn(0.001):
            break
    assert not server.turn(0.001)
    client.close()


def test_only_a_path_that_had_memory_waits_for_it(tmp_path: Path) -> None:
    now_s = 0.0
    plan = ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, adopt_wait_s=None)
    first = CacheServer(plan, clock_ns=lambda: int(now_s * 1e9))
    while not first.has_memory:
        first.turn(0.001)
    lock = tmp_path / "s.lock"
    record = lock.read_bytes()
    first.close()
    lock.write_bytes(record)  # as a server leaves it that is killed
    lock.chmod(0o600)
    second = CacheServer(plan, clock_ns=lambda: int(now_s * 1e9))
    for _ in range(20):
        second.turn(0.001)
    assert not second.has_memory
    now_s = 3.0
    while not second.has_memory:
        second.turn(0.001)
    second.close()


def test_a_living_servers_memory_is_not_adopted(server: CacheServer, tmp_path: Path) -> None:
    """The server is alive while it works and while it is stopped. A client whose offer is refused maps the new
    memory."""
    (tmp_path / "other").mkdir()
    with child(["-c", SERVER, str(tmp_path / "other" / "s"), str(64 * MIB)], says="serves") as old:
        client = RawClient(tmp_path / "other" / "s", register_of())
        old.send_signal(signal.SIGSTOP)
        waiting = CacheServer(ServerPlan(socket=tmp_path / "w", memory={"": MEMORY}, adopt_wait_s=0.3))
        again = RawClient(tmp_path / "w", register_of(), former=client.held, turn=lambda: waiting.turn(0.001))
        assert not again.joining.keeps_former
        assert again.ask(Adopt(former_boot_id=1, index_bytes=1, segment_sizes=bytes(8))) == AdoptAnswer(
            verdict=AdoptVerdict.HAS_MEMORY
        )
        again.close()
        waiting.close()
        client.close()
    for file in (tmp_path / "other").iterdir():
        file.unlink()
    (tmp_path / "other").rmdir()


@pytest.mark.parametrize("message", [Farewell(), Offer(former_boot_id=1, first=0, segment_sizes=b"", is_last=True)])
def test_nobody_takes_a_servers_lock_by_sending_it(tmp_path: Path, message: ClientMessage) -> None:
    """A process that closes any descriptor of a file drops its lock on it."""
    with child(["-c", SERVER, str(tmp_path / "s"), str(64 * MIB)], says="serves") as owner:
        client = RawClient(tmp_path / "s", register_of())
        assert client.held is not None
        assert native.find_lock_owner(client.held.lock) == owner.pid
        data = CODEC.encode_call(message, number=1, channel=Channel.LIFELINE)
        assert client.lifeline.send(data, [client.held.lock] * 3)
        # It has served that when it answers another process.
        other = RawClient(tmp_path / "s", register_of(), engine="other")
        assert isinstance(other.ask(Stats()), Counts)
        assert native.find_lock_owner(client.held.lock) == owner.pid
        other.close()
        client.close()


def test_who_cannot_be_handed_the_memory_is_let_go_and_the_server_goes_on(
    server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = connect(server, tmp_path, engine="other")

    def fail(cache: LocalCache, session: int, *, heeds: bool) -> int:
        raise RuntimeError("opening a segment again: Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(LocalCache, "open_signed_index", fail)
        with pytest.raises(PacketError, match="closed"):
            connect(server, tmp_path)
    assert f"a process of user {os.getuid()} gets no memory, and is let go: opening a segment again" in caplog.text
    assert isinstance(other.ask(Stats()), Counts)
    connect(server, tmp_path).close()
    other.close()


def test_greetings_are_answered_while_memory_is_taken(
    server: CacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    begin = LocalCache.begin

    def begin_slowly(*settings: Any) -> LocalCache:
        assert may_go_on.wait(60)
        return begin(*settings)

    monkeypatch.setattr(LocalCache, "begin", begin_slowly)
    joined: list[RawClient] = []

    def turn() -> None:
        server.turn(0.001)
        if server.core.sessions and not may_go_on.is_set():
            assert not server.pools.caches
            may_go_on.set()

    joined.append(RawClient(tmp_path / "s", register_of(), turn=turn))
    assert isinstance(joined[0].ask(Stats()), Counts)
    joined[0].close()


GROWING = CacheSettings(
    memory_bytes=64 * MIB, segment_bytes=16 * MIB, extent_bytes=64 * KIB, entry_limit=8192, step_bytes=4 * MIB
)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Pools grow by one step each time that it is released."""
    allowed = threading.Semaphore(0)
    grow = LocalCache.grow

    def grow_when_allowed(self: LocalCache, _keep_free_bytes: int = 0) -> bool:
        assert allowed.acquire(timeout=60)
        return grow(self)

    monkeypatch.setattr(LocalCache, "grow", grow_when_allowed)
    return allowed


def test_blocks_are_saved_and_found_while_memory_grows(tmp_path: Path, steps: threading.Semaphore) -> None:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": GROWING}))
    client = connect(server, tmp_path)
    reader = client.index
    save(client, hashes_of(3), 5)
    counts = client.ask(Stats())
    assert isinstance(counts, Counts)
    assert (counts.ready_bytes, counts.capacity_bytes) == (4 * MIB, 64 * MIB)
    assert reader.ready_bytes == 4 * MIB
    leased = acquire(client, hashes_of(3))
    steps.release(100)
    cache = server.pools.caches[""]
    while reader.ready_bytes < 64 * MIB:
        server.turn(0.001)
    assert cache.stats.ready_bytes == 64 * MIB
    assert acquire(client, hashes_of(3)).groups[0].addresses == leased.groups[0].addresses
    client.close()
    server.close()


@pytest.mark.parametrize("ends", ["stop", "drain"])
def test_a_server_ends_while_its_memory_grows(tmp_path: Path, steps: threading.Semaphore, ends: str) -> None:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": GROWING}))
    client = connect(server, tmp_path)
    save(client, hashes_of(3), 5)
    cache = server.pools.caches[""]
    if ends == "stop":
        server.stop()
    else:
        assert isinstance(client.ask(Drain()), Draining)
    while server.turn(0.001):
        pass
    steps.release(100)
    assert not cache.grow()
    assert cache.ready_bytes == 4 * MIB
    client.close()
    server.close()


def test_a_server_that_is_stopped_while_it_takes_memory_ends(tmp_path: Path) -> None:
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    server.turn(0)
    server.stop()
    while server.turn(0.001):
        pass
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_the_path_is_free_when_all_else_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor makes files of the same names, and wants the memory."""
    looked: list[Path] = []
    for kind in (ControlSocket, LocalCache):

        def close(self: object, close: Callable[[object], None] = kind.close) -> None:
            close(self)
            with pytest.raises(ConfigError, match="is another server's"):
                UnixListener(tmp_path / "s")
            looked.append(tmp_path)

        monkeypatch.setattr(kind, "close", close)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    connect(server, tmp_path).close()
    server.close()
    assert len(looked) == 2
    UnixListener(tmp_path / "s").close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_servers_memory_is_adopted_by_the_next(tmp_path: Path) -> None:
    with child(["-c", SERVER, str(tmp_path / "s"), str(64 * MIB)], says="serves") as old:
        client = RawClient(tmp_path / "s", register_of())
        hashes = hashes_of(4)
        save(client, hashes, 9)
        hit = acquire(client, hashes)
        old.send_signal(signal.SIGKILL)
        old.wait()
    # Look-ups and what is leased go on without it.
    assert client.index.lookup(client.name_space, 0, hashes).all()
    (address, *_) = np.frombuffer(hit.groups[0].addresses, "<u8").tolist()
    assert set(client.segments.view(address, RECORD_BYTES).tolist()) == {9}
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}, adopt_wait_s=60))
    again = RawClient(tmp_path / "s", register_of(), former=client.held, turn=lambda: server.turn(0.001))
    assert again.joining.keeps_former
    found = acquire(again, hashes)
    assert (found.outcome, found.boundary) == (AcquireOutcome.HIT, 64)
    again.close()
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"a": 0}, {"a": 8 * MIB}, id="quota given"),
        pytest.param({"a": 8 * MIB}, {"a": 0}, id="quota taken"),
        pytest.param({"b": 0, "a": 8 * MIB}, {"a": 4 * MIB, "c": MIB}, id="one gone, one new"),
        pytest.param(
            {f"old {i}": MIB * (i % 2) for i in range(TENANT_LIMIT)},
            {f"new {i}": MIB * (i % 3) for i in range(TENANT_LIMIT)},
            id="as many others",
        ),
        pytest.param({"a": MIB}, {}, id="none left"),
    ],
)
def test_a_successor_with_other_tenants_adopts_the_memory(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    """The present configuration names the tenants that share a pool, not that of a server that has ended."""
    named = [f"{name}={quota}" for name, quota in before.items()]
    with child(["-c", SERVER, str(tmp_path / "s"), str(64 * MIB), *named], says="serves") as old:
        client = RawClient(tmp_path / "s", register_of())
        hashes = hashes_of(4)
        save(client, hashes, 9)
        old.send_signal(signal.SIGKILL)
        old.wait()
    tenants = tuple(TenantSettings(name=name, quota_bytes=quota) for name, quota in after.items())
    plan = ServerPlan(
        socket=tmp_path / "s", memory={"": MEMORY}, domains=(DomainSettings(name="", tenants=tenants),), adopt_wait_s=60
    )
    with closing(client), closing(CacheServer(plan)) as server:
        again = RawClient(tmp_path / "s", register_of(), former=client.held, turn=lambda: server.turn(0.001))
        with closing(again):
            assert again.joining.keeps_former
            assert acquire(again, hashes).outcome is AcquireOutcome.HIT
            counts = again.ask(Stats())
    assert isinstance(counts, Counts)
    assert {one.name: one.quota_bytes for one in counts.tenants} == {"": 0, **after}
    assert sum(one.used_bytes for one in counts.tenants) == 4 * RECORD_BYTES
    payer = next(iter(before))
    assert {one.name for one in counts.tenants if one.used_bytes} == {payer if payer in after else ""}


def test_engines_that_came_first_do_not_wait_for_something_else_to_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its memory comes, no turn sleeps as long as it may."""
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": MEMORY}))
    waits: list[tuple[bool, int]] = []
    poll = zmq.Poller.poll

    def note(poller: zmq.Poller, timeout: int) -> Any:
        waits.append((server.has_memory, timeout))
        return poll(poller, min(timeout, 1))

    monkeypatch.setattr(zmq.Poller, "poll", note)
    try:
        while not server.has_memory:
            server.turn(3600)
    finally:
        server.close()
    asleep = [timeout for has_memory, timeout in waits if not has_memory]
    assert asleep
    assert max(asleep) <= 10
