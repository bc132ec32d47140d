"""A client of a real server: the contract, and every way in which the server may be gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import AcquireOutcome, Ask, Publication
from kvoffload.client import Client, Heard, InventoryBegun, InventoryEnded, LinkSettings, LinkState
from kvoffload.client.private_server import find_or_start
from kvoffload.config.sources import Settings
from kvoffload.errors import PrivateServerError, ServerError
from kvoffload.protocol import ErrorCode, EventsLost, NamespaceOpened, Role, Stored
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN
from tests.kit.cache.offload_contract import (
    BLOCKS,
    CHAIN,
    TOKENS,
    OffloadCacheContract,
    has_patterns,
    names_of,
    save,
)
from tests.kit.children import child
from tests.kit.client.served import WAIT_S, find_servers, served, wait_for
from tests.unit.client.conftest import SERVER, make_settings

STOCKED = LinkSettings(call_deadline_s=20.0, acquire_deadline_s=20.0, stock_slots=(128, 64, 8))


class TestClient(OffloadCacheContract):
    @pytest.fixture
    def cache(self, socket_path: Path) -> Iterator[Any]:
        with served(socket_path) as client, served(socket_path, role=Role.OBSERVER) as observer:
            before = observer.stats().reserved
            yield client
            wait_for(lambda: observer.stats().reserved - before in (0, BLOCKS))
            client.close()
            wait_for(lambda: observer.stats().leases == 0)


def test_two_engines_share_what_one_has_computed(socket_path: Path) -> None:
    with served(socket_path, name="shared") as first, served(socket_path, name="shared") as second:
        assert first.memory_id == second.memory_id
        save(first)
        found = second.acquire(Ask(CHAIN))
        assert found.boundary == TOKENS
        assert found.lease is not None
        assert has_patterns(second, found.lease.memory_id, 0, found.groups[0].addresses, CHAIN)


def test_two_models_have_one_pool_and_nothing_else(socket_path: Path) -> None:
    with served(socket_path) as hybrid, served(socket_path, geometry=PLAIN) as plain:
        save(hybrid)
        assert not plain.lookup(0, CHAIN).any()
        assert plain.acquire(Ask(CHAIN)).outcome is AcquireOutcome.MISS
        assert plain.stats().readable == hybrid.stats().readable > 0


def test_it_says_how_much_of_a_memory_may_be_touched(socket_path: Path) -> None:
    with served(socket_path) as client:
        assert client.ready_bytes(client.memory_id) == client.memory(client.memory_id).size_bytes == 16 << 20
        with pytest.raises(ValueError, match="memory 1 is not mapped here"):
            client.ready_bytes(1)


def test_slots_are_held_ready(socket_path: Path) -> None:
    with served(socket_path, link=STOCKED) as client:
        taken = wait_for(lambda: client.take(2, 5))
        assert (len(taken), taken.group, taken.memory_id) == (5, 2, client.memory_id)
        assert (client.most_slots(1), client.ready_slots()[1]) == (64, 64)
        assert len(client.take(1, 1000)) == 64
        assert wait_for(lambda: client.ready_slots()[1]) == 64
        more = wait_for(lambda: client.take(1, 1000))
        assert not set(more.tickets.tolist()) & set(taken.tickets.tolist())
        held = client.stats().reserved
        client.abort(taken)
        assert client.stats().reserved == held - 5


def test_callers_never_join_and_wake_whoever_does(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To dial and to map memory may take long, which a scheduler's thread must not wait for."""
    client = Client(make_settings(socket_path))  # its keeper does not run
    link, wire = client.link, client.wire

    def receive(link: Any, now_ns: int) -> bool:
        link.hang_up(now_ns, "gone")
        return True

    try:
        client.take(0, 1)
        assert client.link.state is LinkState.DOWN
        link.on_time(time.monotonic_ns())
        client.take(0, 1)
        assert client.link.state is LinkState.JOINING
        while client.link.state is LinkState.JOINING:
            wire.await_answers(0.01)
            wire.receive_all(link, time.monotonic_ns())
        monkeypatch.setattr(wire, "receive_answers", receive)
        assert not client.connection.is_woken
        client.take(0, 1)
        assert (client.link.state, client.fault) == (LinkState.DOWN, "gone")
        assert client.connection.is_woken
    finally:
        client.close()


def test_a_refusal_says_what_differs_and_is_tried_again(socket_path: Path) -> None:
    with (
        served(socket_path, name="same") as first,
        Client(make_settings(socket_path, name="same", geometry=PLAIN)) as other,
    ):
        refusal = wait_for(lambda: other.link.refusal)
        assert refusal.code is ErrorCode.MISMATCH
        assert "groups" in refusal.field
        assert refusal.message in other.fault
        assert not other.wait_until_served(0.01)
        assert not other.lookup(0, CHAIN).any()
        assert first.is_served


def test_a_client_that_was_not_started_sends_nothing(tmp_path: Path) -> None:
    client = Client(make_settings(tmp_path / "nobody"))
    assert (client.link.state, client.is_served, client.fault, client.link.refusal) == (LinkState.DOWN, False, "", None)
    assert (client.link.boot_id, client.memory_id) == (0, 0)
    assert not client.lookup(0, CHAIN).any()
    assert client.find_boundary(Ask(CHAIN, local=16)) == 16
    with pytest.raises(ValueError, match="not mapped here"):
        client.memory(7)
    client.close()


def test_without_a_server_everything_is_a_miss(tmp_path: Path) -> None:
    with Client(make_settings(tmp_path / "nobody")) as client:
        assert wait_for(lambda: client.fault) == f"{tmp_path}/nobody is not there"
        assert not client.wait_until_served(0.05)
        assert (client.memory_id, client.link.boot_id, client.link.state) == (0, 0, LinkState.DOWN)
        assert not client.lookup(0, CHAIN).any()
        assert client.find_boundary(Ask(CHAIN, local=16)) == 16
        assert client.acquire(Ask(CHAIN, local=16)).boundary == 16
        slots = client.reserve(0, count=3)
        assert len(slots) == len(client.take(0, 3)) == 0
        client.publish(Publication(slots, hashes=b""))
        client.abort(slots)
        client.invalidate(0, CHAIN)
        client.prefetch(Ask(CHAIN))
        with pytest.raises(ServerError, match="did not answer"):
            client.stats()
    assert client.link.state is LinkState.CLOSED


def test_events_are_told(socket_path: Path) -> None:
    told: list[tuple[Heard, int]] = []
    with (
        Client(
            make_settings(socket_path, role=Role.OBSERVER), on_event=lambda *event: told.append(event)
        ).start() as router,
        served(socket_path) as client,
    ):
        assert router.wait_until_served(WAIT_S)
        router.subscribe()
        router.stats()
        slots = client.reserve(0, hashes=CHAIN)
        for shard in range(2):
            client.publish(Publication(slots, hashes=CHAIN, shard=shard))
        wait_for(lambda: any(isinstance(event, Stored) and event.hashes == CHAIN for event, _ in told))
        assert [number for _, number in told] == list(range(1, len(told) + 1))
        assert isinstance(told[0][0], NamespaceOpened)


def cut(names: bytes) -> list[bytes]:
    return [names[at : at + 32] for at in range(0, len(names), 32)]


def test_who_comes_later_is_told_what_is_there_and_again_by_the_next_server(tmp_path: Path) -> None:
    """Blocks that were there before, and those of a server that has adopted the memory."""
    path = tmp_path / "s"
    told: list[Heard] = []

    def has_ended() -> bool:
        return InventoryEnded() in told

    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = Client(make_settings(path), on_event=lambda event, _: told.append(event)).start()
        assert client.wait_until_served(WAIT_S)
        slots = client.reserve(0, hashes=CHAIN)
        for shard in range(2):
            parents = bytes(32) + CHAIN[:-32]
            client.publish(Publication(slots, hashes=CHAIN, shard=shard, parents=parents))
        client.stats()
        client.subscribe(with_inventory=True)
        wait_for(has_ended)
        assert client.take_inventory()
        server.kill()
        server.wait()
        wait_for(lambda: not client.is_served)
        assert not client.take_inventory()
    first = told.copy()
    told.clear()
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        wait_for(has_ended)
        for heard in (first, told):
            begin = heard.index(InventoryBegun())
            opened, listed = heard[begin - 1 : begin + 2 : 2]
            assert isinstance(opened, NamespaceOpened)
            assert isinstance(listed, Stored)
            assert (listed.name_space, listed.group) == (opened.name_space, 0)
            assert sorted(cut(listed.hashes)) == sorted(cut(CHAIN))
            parents = dict(zip(cut(listed.hashes), cut(listed.parents), strict=True))
            assert parents == dict(zip(cut(CHAIN), [bytes(32), *cut(CHAIN)[:-1]], strict=True))
    client.close()


def test_a_killed_servers_hits_go_on_and_its_memory_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    told: list[Heard] = []
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = Client(make_settings(path, link=STOCKED), on_event=lambda event, _: told.append(event)).start()
        assert client.wait_until_served(WAIT_S)
        client.subscribe()
        save(client)
        memory_id, boot_id = client.memory_id, client.link.boot_id
        leased = client.acquire(Ask(CHAIN))
        assert leased.lease is not None
        slots = wait_for(lambda: client.take(2, 2))
        server.kill()
        server.wait()
        wait_for(lambda: not client.is_served)
        # Leased blocks are read and look-ups find their blocks, without a request to the server and without a wait.
        assert has_patterns(client, memory_id, 0, leased.groups[0].addresses, CHAIN)
        assert client.lookup(0, CHAIN).all()
        assert not client.acquire(Ask(CHAIN)).is_hit
        client.release(leased.lease)
        client.abort(slots)
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        assert client.wait_until_served(WAIT_S), client.fault
        assert (client.memory_id, client.link.boot_id != boot_id) == (memory_id, True)
        # Messages sent while the server was away have been served: no lease is open, and only the slots held ready are
        # reserved.
        assert client.stats().leases == 0
        again = client.acquire(Ask(CHAIN))
        assert again.boundary == TOKENS
        assert again.lease is not None
        assert has_patterns(client, memory_id, 1, again.groups[1].addresses, names_of(1)[32 * again.groups[1].first :])
        client.release(again.lease)
        assert client.stats().sessions == 1
        assert any(isinstance(event, EventsLost) for event in told)
        client.close()


def test_new_memory_is_taken_and_the_old_is_kept_while_it_is_leased(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path)
        save(client)
        old = client.memory_id
        leased = client.acquire(Ask(CHAIN))
        assert leased.lease is not None
        slots = client.reserve(0, count=1)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    other = tmp_path / "t"
    with child(["-c", SERVER, str(other), "0"], says="serves"):
        with served(other, role=Role.OBSERVER) as observer:
            wait_for(lambda: _has_memory(observer))
        other.rename(path)
        wait_for(lambda: client.memory_id != old)
        assert client.wait_until_served(WAIT_S)
        assert has_patterns(client, old, 0, leased.groups[0].addresses, CHAIN)
        assert not client.lookup(0, CHAIN).any()
        assert not client.publish(Publication(slots, hashes=bytes(32)))
        client.release(leased.lease)
        with pytest.raises(ValueError, match="not mapped here"):
            client.memory(old)
        stats = client.stats()
        assert (stats.readable, stats.reserved, stats.leases) == (0, 0, 0)
        client.close()


def test_an_acquire_can_be_left_to_itself(socket_path: Path) -> None:
    with served(socket_path) as client:
        save(client)
        pending = client.start_acquire(Ask(CHAIN))
        client.cancel(pending)
        found = client.poll(pending)
        assert found is not None
        assert not found.is_hit
        wait_for(lambda: client.stats().leases == 0)
        later = client.start_acquire(Ask(CHAIN))
        wait_for(lambda: client.poll(later) is not None)
        client.cancel(later)
        assert client.stats().leases == 0


def test_calls_go_on_side_by_side(socket_path: Path) -> None:
    with served(socket_path) as client:
        save(client)
        calls = [client.start_acquire(Ask(CHAIN)) for _ in range(100)]
        found = [wait_for(partial(client.poll, call)) for call in calls]
        assert {one.boundary for one in found} == {TOKENS}
        assert len({one.lease for one in found}) == 100
        assert client.stats().leases == 100
        for one in found:
            client.release(one.lease)
        assert client.stats().leases == 0


def test_many_threads_may_ask_at_once(socket_path: Path) -> None:
    with served(socket_path) as client:
        save(client)
        hits: list[int] = []

        def act() -> None:
            for _ in range(50):
                found = client.acquire(Ask(CHAIN))
                hits.append(found.boundary)
                assert found.lease is not None
                client.release(found.lease)

        threads = [threading.Thread(target=act) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hits == [TOKENS] * 200
        assert client.stats().leases == 0


def test_a_drained_server_is_told_goodbye(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path)
        save(client)
        leased = client.acquire(Ask(CHAIN))
        assert leased.lease is not None
        assert client.drain().leases == 1
        assert not client.acquire(Ask(CHAIN)).is_hit
        assert server.poll() is None
        client.release(leased.lease)
        assert server.wait(WAIT_S) == 0
        wait_for(lambda: client.link.state is not LinkState.SERVING)
        client.close()


def test_an_upgrade_loses_nothing(tmp_path: Path) -> None:
    """The old server ends when no engine holds anything; the new one adopts its memory."""
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path)
        save(client)
        memory_id, readable = client.memory_id, client.stats().readable
        client.drain()
        assert server.wait(WAIT_S) == 0
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        assert client.wait_until_served(WAIT_S), client.fault
        assert (client.memory_id, client.stats().readable) == (memory_id, readable)
        found = client.acquire(Ask(CHAIN))
        assert (found.boundary, found.lease is not None) == (TOKENS, True)
        client.close()


def test_a_private_server_is_started_and_started_again(tmp_path: Path) -> None:
    """It is found before every attempt: what was found may have ended."""
    asked: list[bool] = []
    settings = Settings(memory=64 * MIB, segment_size=64 * MIB, log_level="warning")

    def find(holds_memory: bool) -> Path:
        asked.append(holds_memory)
        if len(asked) == 2:
            raise PrivateServerError("not now", remedy="wait")
        return find_or_start(settings, tmp_path, holds_memory=holds_memory)

    client_settings = replace(make_settings(tmp_path), socket=find)
    with Client(client_settings) as client:
        assert client.wait_until_served(WAIT_S), client.fault
        memory_id = client.memory_id
        save(client)
        (server,) = find_servers(tmp_path)
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: not client.is_served)
        assert client.wait_until_served(WAIT_S), client.fault
        assert client.memory_id == memory_id
        assert client.acquire(Ask(CHAIN)).is_hit
        (server,) = find_servers(tmp_path)
        # The end of the process is what ends it for good; here it is stopped.
        client.close()
        os.kill(server, signal.SIGTERM)
    wait_for(lambda: not find_servers(tmp_path))
    assert asked == [False, True, True]


def _has_memory(observer: Client) -> bool:
    try:
        return observer.stats().capacity_bytes > 0
    except ServerError:
        return False
