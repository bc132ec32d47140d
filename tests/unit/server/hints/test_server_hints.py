"""Hints to real servers: prefixes come from a disk, from Valkey and from a peer; a restart ends what is retained."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from kvoffload.cache import Ask
from kvoffload.client import Client, HintSettings
from kvoffload.client.insight import expect
from kvoffload.errors import ServerError
from kvoffload.protocol import Hint, HintAction, Hinted, HintOutcome, Role
from kvoffload.protocol.hints import ListRetained, Retained
from kvoffload.server.loop import CacheServer
from kvoffload.server.tiering.settings import TierPlan
from tests.kit.cache.offload_contract import CHAIN, TOKENS, save
from tests.kit.children import child
from tests.kit.client.served import served, wait_for
from tests.kit.server.fleets import Fleet
from tests.kit.server.shared_stores import share_valkey
from tests.kit.server.tiers import MEMORY, NAME, WAIT_S, await_that, counts_of, disk_below, serving, traffic_of
from tests.unit.client.conftest import SERVER, make_settings

RECORDS = 16 + 8 + 4
PREFETCH = HintSettings(action=HintAction.PREFETCH, chain=CHAIN)
RETAIN = HintSettings(action=HintAction.RETAIN, chain=CHAIN, session="s")


@contextmanager
def on_disk(folder: Path) -> Iterator[TierPlan]:
    folder.mkdir(mode=0o700)
    yield disk_below(folder)


@contextmanager
def in_valkey(folder: Path) -> Iterator[TierPlan]:
    folder.mkdir()
    with share_valkey(folder) as store:
        yield store.below()


def empty(server: CacheServer) -> None:
    cache = server.core.domains[""].cache
    assert cache is not None
    await_that(lambda: cache.evict(1 << 40) == 0)


def do_hint(client: Client, hint: HintSettings) -> Hinted:
    """Hints, and waits for the answer. ServerError: the server takes none, or refuses this one."""
    pending = client.start_hint(hint)
    wait_for(lambda: pending.is_over)
    return expect(pending.answer, Hinted, "hint")


@pytest.mark.parametrize("tier", [on_disk, in_valkey])
def test_a_prefix_comes_up_before_its_request(
    tmp_path: Path, tier: Callable[[Path], AbstractContextManager[TierPlan]]
) -> None:
    with (
        tier(tmp_path / "tier") as plan,
        serving(tmp_path / "s", tiers={"": [plan]}) as server,
        Client(make_settings(tmp_path / "s", name=NAME)) as client,
    ):
        assert client.wait_until_served(WAIT_S)
        save(client)
        await_that(lambda: counts_of(server)["written"] == RECORDS)
        empty(server)
        told = do_hint(client, PREFETCH)
        assert (told.outcome, told.tokens) == (HintOutcome.DONE, TOKENS)
        await_that(lambda: client.find_boundary(Ask(CHAIN)) == TOKENS)
        found = client.acquire(Ask(CHAIN))
        assert found.lease is not None
        client.release(found.lease)
        await_that(lambda: client.insight().hint_tokens.get("hit_prefetched") == TOKENS)


def test_a_session_that_another_server_keeps_comes_from_there(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    with ExitStack() as stack:
        servers = {name: stack.enter_context(fleet.serving(name)) for name in fleet.members}
        await_that(
            lambda: all(
                one.state.value == "ready" for server in servers.values() for one in traffic_of(server).health()
            )
        )
        fleet.save_at("a", servers["a"])
        with fleet.client("b") as client:
            assert client.wait_until_served(WAIT_S)
            wanted = HintSettings(action=HintAction.HAND_OVER, chain=CHAIN, session="s", ttl_s=60)
            told = do_hint(client, wanted)
            assert (told.outcome, told.tokens) == (HintOutcome.DONE, TOKENS)
            await_that(lambda: client.find_boundary(Ask(CHAIN)) == TOKENS)
            await_that(lambda: client.insight().retained == 1)
            assert do_hint(client, HintSettings(action=HintAction.RELEASE, session="s")).tokens == TOKENS


def test_after_a_restart_the_blocks_are_there_and_nothing_is_retained(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = served(path)
        save(client)
        assert do_hint(client, RETAIN).outcome is HintOutcome.DONE
        assert client.insight().retained == 1
        server.kill()
        server.wait()
        while client.is_served:
            time.sleep(0.01)
        with pytest.raises(ServerError, match="hint"):
            do_hint(client, RETAIN)
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        assert client.wait_until_served(WAIT_S)
        assert client.find_boundary(Ask(CHAIN)) == TOKENS
        assert client.insight().retained == 0
        await_that(lambda: not client.stats().leases)
        assert do_hint(client, HintSettings(action=HintAction.RELEASE, session="s")).outcome is HintOutcome.NOTHING
        assert do_hint(client, RETAIN).outcome is HintOutcome.DONE
        client.close()


def test_a_save_that_finds_no_room_gets_it_when_a_retention_has_given_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as server, Client(make_settings(path)) as client:
        assert client.wait_until_served(WAIT_S)
        await_that(lambda: server.ready_bytes == MEMORY.memory_bytes)
        save(client)
        assert do_hint(client, RETAIN).outcome is HintOutcome.DONE
        taken = client.reserve(0, count=65_536)
        await_that(lambda: not client.insight().retained)
        assert len(taken)
        assert len(client.reserve(0, count=8)) == 8
        assert client.insight().hint_tokens["gave_way"] == TOKENS


def test_a_hint_of_a_thread_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    told: queue.Queue[Hinted | None] = queue.Queue()
    with Client(make_settings(path)) as client:
        pending = client.start_hint(RETAIN, on_answer=told.put)
        assert (pending.is_over, told.get_nowait()) == (True, None)
        with serving(path):
            assert client.wait_until_served(WAIT_S)
            pending = client.start_hint(RETAIN, on_answer=told.put)
            found = told.get(timeout=WAIT_S)
            assert found is not None
            assert (found.outcome, pending.answer) == (HintOutcome.NOTHING, found)
            with Client(make_settings(path, role=Role.OBSERVER)) as operator:
                assert operator.wait_until_served(WAIT_S)
                listed = operator.look_into(ListRetained())
                assert isinstance(listed, Retained)
                assert listed.total == 0
                hint = Hint(name_space=0, action=HintAction.RELEASE, session="s")
                assert operator.look_into(hint) == Hinted(outcome=HintOutcome.NOTHING)
