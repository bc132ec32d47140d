"""The cache's face: one test per promise. test_cache_states.py runs everything against a model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvoffload import native
from kvoffload.cache import (
    AcquireOutcome,
    Ask,
    CacheFiles,
    CacheSettings,
    IndexReader,
    LocalCache,
    SessionId,
)
from kvoffload.errors import CacheMemoryError
from tests.kit.cache.cache_model import (
    HYBRID,
    KIB,
    MIB,
    PLAIN,
    SMALL,
    block_hashes,
    fingerprint,
    has_pattern,
    make_chain,
)
from tests.kit.cache.chains import save_chain


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with LocalCache.create(SMALL) as made:
        yield made


def test_a_request_is_hit_as_far_as_it_was_saved(cache: LocalCache) -> None:
    name_space = cache.open_namespace(fingerprint("a"), PLAIN)
    session = cache.open_session()
    save_chain(cache, session, name_space, make_chain(1, 7))
    acquired = cache.acquire(session, name_space, Ask(make_chain(1, 12)))
    assert (acquired.outcome, acquired.boundary) == (AcquireOutcome.HIT, 7 * 16)
    assert len(set(acquired.groups[0].addresses)) == 7


def test_memory_that_cannot_be_had_is_one_clear_line() -> None:
    with pytest.raises(CacheMemoryError, match=r"^1024TiB for cached blocks cannot be had: ") as fault:
        LocalCache.create(CacheSettings(memory_bytes=1 << 50, segment_bytes=1 << 40, entry_limit=1000))
    assert "\n" not in str(fault.value)


GROWING = CacheSettings(
    memory_bytes=64 * MIB, segment_bytes=8 * MIB, extent_bytes=64 * KIB, entry_limit=8192, step_bytes=4 * MIB
)


def test_progress_ends_with_all_memory() -> None:
    seen: list[tuple[int, int]] = []
    with LocalCache.create(GROWING, progress=lambda ready, total: seen.append((ready, total))):
        assert seen[-1] == (64 * MIB, 64 * MIB)
        assert seen == sorted(set(seen))


def test_an_exception_out_of_progress_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LocalCache, "close", lambda _self: closed.append("once"))

    def refuse(_ready: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalCache.create(GROWING, progress=refuse)
    assert closed == ["once"]


def test_a_cache_is_of_use_from_its_first_step_on() -> None:
    with LocalCache.begin(GROWING) as cache:
        assert (cache.ready_bytes, cache.capacity_bytes) == (4 * MIB, 64 * MIB)
        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        session = cache.open_session()
        save_chain(cache, session, name_space, make_chain(1, 7))
        assert cache.grow()
        assert (cache.stats.ready_bytes, cache.stats.capacity_bytes) == (8 * MIB, 64 * MIB)
        while cache.grow():
            pass
        assert cache.ready_bytes == 64 * MIB
        assert cache.acquire(session, name_space, Ask(make_chain(1, 7))).boundary == 7 * 16


def test_growing_can_be_stopped_from_another_thread() -> None:
    with LocalCache.begin(GROWING) as cache:
        grown = threading.Thread(target=lambda: all(iter(cache.grow, False)))
        grown.start()
        cache.stop_growing()
        grown.join()
        assert not cache.grow()
        ready_bytes = cache.ready_bytes
        assert ready_bytes % (4 * MIB) == 0
        session = cache.open_session()
        assert len(cache.reserve(session, cache.open_namespace(fingerprint("a"), PLAIN), 0, count=3)) == 3
        assert cache.ready_bytes == ready_bytes


def test_a_shortage_while_it_grows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_short(_core: object, _progress: object, _keep_free_bytes: int) -> bool:
        raise RuntimeError("5B of memory are not there: 4B are left")

    with LocalCache.begin(replace(GROWING, keep_free_bytes=0)) as cache:
        with monkeypatch.context() as short:
            short.setattr(native.Cache, "grow", fall_short)
            with pytest.raises(CacheMemoryError, match="5B of memory are not there: 4B are left"):
                cache.grow()
        assert cache.grow()


def test_a_closed_cache_says_so_and_its_views_stay(cache: LocalCache) -> None:
    name_space = cache.open_namespace(fingerprint("a"), PLAIN)
    session = cache.open_session()
    address = int(cache.reserve(session, name_space, 0, count=1).addresses[0])
    view = cache.view(address, 4096)
    view[:] = 7
    cache.close()
    with pytest.raises(ValueError, match=r"^the cache is closed$"):
        cache.lookup(name_space, 0, bytes(32))
    assert (view == 7).all()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda cache, session: cache.lookup(0, 0, bytes(31)), "hashes have 32 bytes each"),
        (lambda cache, session: cache.lookup(0, 1, bytes(32)), "no such group"),
        (lambda cache, session: cache.lookup(1 << 26, 0, bytes(32)), "no such group"),
        (lambda cache, session: cache.lookup(7, 64, bytes(32)), "no such group"),
        (lambda cache, session: cache.acquire_entries(session, 7, 0, bytes(32)), "no such group"),
        (lambda cache, session: cache.invalidate(0, 0, bytes(33)), "hashes have 32 bytes each"),
        (lambda cache, session: cache.invalidate(0, 1, bytes(32)), "no such group"),
        (lambda cache, session: cache.leave_tier_notes(0, 0, bytes(64), np.ones(1, np.bool_)), "a byte for each hash"),
        (lambda cache, session: cache.leave_tier_notes(0, 1, bytes(32), np.ones(1, np.bool_)), "no such group"),
        (lambda cache, session: cache.clear(99), "no namespace has number 99"),
        (lambda cache, session: cache.acquire(session, 9, Ask(bytes(32))), "no namespace has number 9"),
        (lambda cache, session: cache.acquire(session, 0, Ask(bytes(32), shards=(0, 1))), "has a shard 1"),
        (lambda cache, session: cache.acquire_entries(session, 0, 0, bytes(32), shards=(0, 1)), "has a shard 1"),
        (lambda cache, session: cache.acquire_entries(session, 0, 1, bytes(32)), "no such group"),
        (lambda cache, session: cache.acquire_entries(session, 0, 0, bytes(33)), "hashes have 32 bytes each"),
        (lambda cache, session: cache.reserve(session, 0, 0, hashes=bytes(33)), "hashes have 32 bytes each"),
        (lambda cache, session: cache.reserve(session, 0, 0, count=2**63), "no cache has 9223372036854775808 entries"),
        (lambda cache, session: cache.abort(session, np.ones(1)), "tickets must have dtype uint64, not float64"),
        (
            lambda cache, session: cache.commit(
                session, 0, 0, np.ones(1, np.uint64), hashes=bytes(32), digests=np.ones(1, np.int64)
            ),
            "digests must have dtype uint64, not int64",
        ),
        (
            lambda cache, session: cache.commit(session, 0, 0, np.ones(1, np.uint64), hashes=bytes(32), shard=1),
            "the group has no shard 1",
        ),
        (lambda cache, session: cache.acquire(session, 0, Ask(bytes(33))), "a chain has 32 bytes a hash"),
        (lambda cache, session: cache.reserve(session, 0, 3, count=1), "no such group"),
        (lambda cache, session: cache.reserve(session, 0, 0, count=1, tenant=5), "no tenant has number 5"),
        (lambda cache, session: cache.view(MIB, 1), "no slot lies there"),
        (lambda cache, session: cache.open_tenant(""), "a tenant's name has 1 to 55 bytes"),
        (lambda cache, session: cache.add_process(session), "a process is named by"),
        (
            lambda cache, session: cache.commit(session, 0, 0, np.zeros(2, np.uint64), hashes=bytes(32)),
            "not one hash, parent and digest for each ticket",
        ),
        (
            lambda cache, session: cache.commit(
                session, 0, 0, np.ones(1, np.uint64), hashes=bytes(32), digests=np.zeros(1, np.uint64)
            ),
            "0 is no record's digest",
        ),
        (lambda cache, session: cache.open_namespace(fingerprint("a"), HYBRID), "another geometry"),
    ],
)
def test_a_broken_contract_is_one_clear_line(cache: LocalCache, call: object, line: str) -> None:
    cache.open_namespace(fingerprint("a"), PLAIN)
    with pytest.raises(ValueError, match=line):
        call(cache, cache.open_session())  # type: ignore[operator]


def test_nothing_lies_under_a_number_that_nobody_has(cache: LocalCache) -> None:
    """The number may have had an identity: a late call with it finds no blocks, and nothing else happens."""
    session = cache.open_session()
    number = cache.open_namespace(fingerprint("a"), PLAIN)
    slots = cache.reserve(session, number, 0, count=1)
    cache.commit(session, number, 0, slots.tickets, hashes=bytes(32))
    assert cache.forget_namespaces([]) == []
    assert (dict(cache.used_by_each()), cache.used_by(number)) == ({number: 4096}, 4096)
    cache.clear(number)
    assert cache.forget_namespaces([number]) == []
    assert cache.forget_namespaces([]) == [number]
    assert not cache.lookup(number, 0, bytes(64)).any()
    assert cache.invalidate(number, 0, bytes(64)) == 0
    with pytest.raises(ValueError, match="no such group"):
        cache.reserve(session, number, 0, count=1)
    with pytest.raises(ValueError, match="no namespace has number"):
        cache.acquire(session, number, Ask(bytes(64)))


def test_flipped_bytes_are_a_miss_where_every_use_is_verified() -> None:
    settings = CacheSettings(
        memory_bytes=MIB, segment_bytes=MIB, extent_bytes=16 * KIB, entry_limit=100, verify="always"
    )
    with LocalCache.create(settings) as cache:
        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        session = cache.open_session()
        chain = make_chain(1, 5)
        save_chain(cache, session, name_space, chain)
        lease = cache.acquire(session, name_space, Ask(chain))
        cache.view(int(lease.groups[0].addresses[3]), 4096)[100] ^= 1
        cache.release(session, lease.lease)
        assert cache.acquire(session, name_space, Ask(chain)).boundary == 3 * 16
        assert cache.stats.mismatches == 1
        assert list(cache.lookup(name_space, 0, chain)) == [True, True, True, False, True]


def test_a_tenant_over_its_quota_loses_its_own_blocks_first() -> None:
    settings = CacheSettings(memory_bytes=MIB, segment_bytes=MIB, extent_bytes=16 * KIB, entry_limit=1000, policy="lru")
    with LocalCache.create(settings) as cache:
        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        session = cache.open_session()
        small = cache.open_tenant("small", quota_bytes=128 * KIB)
        large = cache.open_tenant("large", quota_bytes=896 * KIB)

        def save(conversation: int, blocks: int, tenant: int) -> None:
            chain = make_chain(conversation, blocks)
            reservation = cache.reserve(session, name_space, 0, hashes=chain, tenant=tenant)
            cache.commit(session, name_space, 0, reservation.tickets, hashes=chain)

        save(1, 200, large)
        for conversation in range(2, 20):
            save(conversation, 20, small)
        assert cache.lookup(name_space, 0, make_chain(1, 200)).all()
        used = {tenant.name: tenant.used_bytes for tenant in cache.stats.tenants}
        assert used["large"] == 200 * 4096
        # The tenant named by the commit pays from then on.
        slots = cache.reserve(session, name_space, 0, hashes=make_chain(50, 4), tenant=small)
        before = {tenant.name: tenant.used_bytes for tenant in cache.stats.tenants}
        cache.commit(session, name_space, 0, slots.tickets, hashes=make_chain(50, 4), tenant=large)
        after = {tenant.name: tenant.used_bytes for tenant in cache.stats.tenants}
        assert (after["small"], after["large"]) == (before["small"] - 4 * 4096, before["large"] + 4 * 4096)


OWNER = """
import os, socket, sys
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from tests.kit.cache.chains import save_chain
from kvoffload.cache import Ask, LocalCache

cache = LocalCache.create(SMALL)
name_space = cache.open_namespace(fingerprint("a"), PLAIN)
session = cache.open_session()
cache.add_process(session, pid=int(sys.argv[2]))
save_chain(cache, session, name_space, make_chain(1, 20))
acquired = cache.acquire(session, name_space, Ask(make_chain(1, 3)))
reservation = cache.reserve(session, name_space, 0, count=4)
files = cache.files
channel = socket.socket(fileno=int(sys.argv[1]))
words = ",".join(map(str, [session, acquired.lease, *reservation.tickets]))
socket.send_fds(channel, [words.encode()], [files.lock, files.index, *files.segments])
channel.recv(1)
"""


def test_a_successor_takes_over_what_a_killed_process_held() -> None:
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-c", OWNER, str(theirs.fileno()), str(os.getpid())]
    with ours, subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as owner:
        theirs.close()
        words, numbers, _, _ = socket.recv_fds(ours, 4096, 16)
        files = CacheFiles(lock=numbers[0], index=numbers[1], segments=tuple(numbers[2:]))
        reader = IndexReader(os.dup(files.index))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    session, lease, *tickets = map(int, words.decode().split(","))
    with LocalCache.adopt(files, SMALL) as cache:
        assert (cache.adoption.readable, cache.adoption.reserved, cache.adoption.dropped) == (20, 4, 0)
        chain = make_chain(1, 20)
        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        assert reader.lookup(name_space, 0, chain).all()
        mine = cache.open_session()
        acquired = cache.acquire(mine, name_space, Ask(chain))
        for name, address in zip(block_hashes(chain, PLAIN, 0), acquired.groups[0].addresses, strict=True):
            assert has_pattern(cache, PLAIN, (name_space, 0), name, int(address))
        # Its member is this very process, so what it held is kept, and goes by its own word.
        assert cache.reclaim_ended() == 0
        assert cache.held_bytes(SessionId(session)) == 7 * 4096
        assert cache.release(SessionId(session), lease)  # type: ignore[arg-type]
        assert cache.abort(SessionId(session), np.array(tickets, np.uint64)) == 4
        cache.release(mine, acquired.lease)
        assert cache.evict(MIB) == 20 * 4096
        assert cache.stats.used_bytes == 0


def test_a_living_process_is_not_robbed() -> None:
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-c", OWNER, str(theirs.fileno()), str(os.getpid())]
    with ours, subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as owner:
        theirs.close()
        _, numbers, _, _ = socket.recv_fds(ours, 4096, 16)
        files = CacheFiles(lock=numbers[0], index=numbers[1], segments=tuple(numbers[2:]))
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(CacheMemoryError, match=r"^the cache cannot be adopted: .*owned by"):
            LocalCache.adopt(files, SMALL)
        owner.kill()


DAEMONS = """
import threading, time
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from kvoffload.cache import Ask, LocalCache

cache = LocalCache.create(SMALL)
name_space = cache.open_namespace(fingerprint("a"), PLAIN)
chain = make_chain(1, 100)

def look_up():
    while True:
        cache.lookup(name_space, 0, chain)

for _ in range(2):
    threading.Thread(target=look_up, daemon=True).start()
time.sleep(0.05)
"""


def test_a_process_ends_while_its_threads_look_up() -> None:
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", DAEMONS], capture_output=True, check=False, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, b"")


FORKED = """
import os, signal, sys
from pathlib import Path
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from tests.kit.cache.chains import save_chain
from kvoffload.cache import LocalCache

cache = LocalCache.create(SMALL)
name_space, session = cache.open_namespace(fingerprint("a"), PLAIN), cache.open_session()
names = lambda: [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
for at in range(2000):
    save_chain(cache, session, name_space, make_chain(at, 4))
    if "kvoffload-curve" in names():
        break
else:
    sys.exit(3)
child = os.fork()
signal.alarm(60)  # whoever waits for the thread is killed
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_ends_without_the_thread_of_the_memory_curve() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_entries_are_found_by_the_beginnings_of_their_hashes(cache: LocalCache) -> None:
    name_space = cache.open_namespace(fingerprint("b"), PLAIN)
    cache.open_namespace(fingerprint("a"), PLAIN)
    save_chain(cache, cache.open_session(), name_space, make_chain(1, 3))
    block = make_chain(1, 3)[32:64]
    found = cache.survey(block[:9], limit=10)
    assert (found.matches, found.hashes) == (1, block)
    columns = (found.name_spaces, found.groups, found.leases, found.tenants, found.used)
    assert [column.tolist() for column in columns] == [[name_space], [0], [0], [0], [0]]
    assert cache.survey(b"", limit=2).matches == 3
    assert len(cache.survey(b"", limit=2).hashes) == 64
    with pytest.raises(ValueError, match="32 bytes"):
        cache.survey(bytes(33), limit=1)


def test_a_forked_child_is_told_and_harms_nobody(cache: LocalCache) -> None:
    name_space = cache.open_namespace(fingerprint("a"), PLAIN)
    session = cache.open_session()
    save_chain(cache, session, name_space, make_chain(1, 3))
    child = os.fork()
    if child == 0:
        try:
            cache.lookup(name_space, 0, make_chain(1, 3))
        except ValueError as fault:
            os._exit(0 if "belongs to the process that made it" in str(fault) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.lookup(name_space, 0, make_chain(1, 3)).all()
