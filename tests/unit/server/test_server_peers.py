"""Servers of one fleet: each block lives with one of them, and all of them have it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.client import Client
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.peers.fleet_registry import RegistrySettings
from kvoffload.server.loop import CacheServer
from kvoffload.server.sessions.session import Guest
from kvoffload.server.sessions.settings import TcpSettings
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.valkey import ValkeySettings
from tests.kit.cache.offload_contract import CHAIN, TOKENS, OffloadCacheContract
from tests.kit.server.fleets import BLOCKS, Fleet
from tests.kit.server.remote_loads import load
from tests.kit.server.tiers import FAR, PAYING, WAIT_S, Settled, await_that, traffic_of
from tests.kit.tiers.valkey_server import serve as serve_valkey
from tests.unit.client.conftest import make_settings


def readable(server: CacheServer) -> int:
    cache = server.core.domains[""].cache
    assert cache is not None
    return cache.stats.readable


def are_ready(*servers: CacheServer) -> bool:
    return all(one.state.value == "ready" for server in servers for one in traffic_of(server).health())


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "trusted"])
def test_what_one_machine_has_computed_all_of_the_fleet_have(tmp_path: Path, *, is_sealed: bool) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c", is_sealed=is_sealed)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(fleet.serving(name)) for name in fleet.members}
        await_that(lambda: are_ready(*servers.values()))
        # One copy in addition to that of the engine's own server.
        sent = fleet.save_at("a", servers["a"])
        await_that(lambda: readable(servers["b"]) + readable(servers["c"]) == sent)
        with fleet.client("b") as client:
            assert client.wait_until_served(WAIT_S)
            # Which of them live on this machine, the keys of the three decide.
            assert client.acquire(Ask(CHAIN)).boundary < TOKENS
            assert load(client) == TOKENS
            stats = client.stats()
        assert stats.traffic["peer"]["promoted"] > 0
        assert {(place.tier, place.state) for place in stats.places} == {("peer", "ready")}
        assert traffic_of(servers["b"]).counts.written == 0, "what came from a peer is not sent to it again"


def test_blocks_that_travel_coded_are_the_same_and_are_counted(tmp_path: Path) -> None:
    """Those that become shorter go from here or come there: which of it, the keys decide."""
    fleet = Fleet(tmp_path, "a", "b", compress=Coding.ON)
    with fleet.serving("a") as one, fleet.serving("b") as two:
        await_that(lambda: are_ready(one, two))
        fleet.save_at("a", one)
        [sent] = traffic_of(one).health()
        with fleet.client("b") as client:
            assert client.wait_until_served(WAIT_S)
            assert load(client) == TOKENS
            [place] = client.stats().places
        counts = sent.counts
        assert counts.get("coded_records", 0) + place.coded_records > 0
        stored_bytes = counts.get("coded_stored_bytes", 0) + place.coded_stored_bytes
        assert 0 < stored_bytes < counts.get("coded_bytes", 0) + place.coded_bytes
        assert traffic_of(two).counts.promoted > 0


def test_a_server_that_ends_takes_its_blocks_and_nothing_else(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    with fleet.serving("a") as one:
        with fleet.serving("b") as two:
            await_that(lambda: are_ready(one, two))
            fleet.save_at("a", one)
        with fleet.client("a") as client:
            assert client.wait_until_served(WAIT_S)
            assert load(client) == TOKENS
            await_that(lambda: [place.state.value for place in traffic_of(one).health()] == ["absent"])
            # No other server is there: this one is the home of all blocks now.
            assert fleet.places["a"].is_home(CHAIN).all()
            assert client.acquire(Ask(bytes(32 * 8)), far=FAR).outcome is AcquireOutcome.MISS
        with fleet.serving("b") as two:
            await_that(lambda: are_ready(one, two))
            assert not fleet.places["a"].is_home(CHAIN).all()
            with fleet.client("b") as client:
                assert client.wait_until_served(WAIT_S)
                load(client)


def test_a_disk_has_what_lives_on_its_machine(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    disks = {name: tmp_path / f"disk-{name}" for name in fleet.members}
    for disk in disks.values():
        disk.mkdir(mode=0o700)
    with fleet.serving("a", disk=disks["a"]) as one, fleet.serving("b", disk=disks["b"]) as two:
        await_that(lambda: are_ready(one, two))
        sent = fleet.save_at("a", one)
        await_that(lambda: traffic_of(two, 0).counts.written == sent)
        await_that(lambda: traffic_of(one, 0).counts.written == BLOCKS - sent)


def test_what_a_home_has_on_its_disk_alone_is_found_by_its_peers(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with fleet.serving("a") as one, fleet.serving("c") as three:
        with fleet.serving("b", disk=disk) as two:
            await_that(lambda: are_ready(one, two, three))
            fleet.save_at("a", one)
            await_that(lambda: traffic_of(two, 0).counts.written == readable(two) > 0)
        await_that(lambda: not (are_ready(one) or are_ready(three)))
        # It is started again, and no engine has introduced the records' identity to it.
        with fleet.serving("b", disk=disk) as two:
            await_that(lambda: two.has_memory and are_ready(one, two, three))
            assert readable(two) == 0
            with fleet.client("c") as client:
                assert client.wait_until_served(WAIT_S)
                assert load(client) == TOKENS
            assert traffic_of(two, 0).counts.promoted > 0


def test_a_server_whose_key_is_not_named_is_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    guests = TcpSettings(address=fleet.members["a"].address, keys=fleet.keys["a"], guests={})
    with (
        fleet.serving("a", remote=guests) as one,
        fleet.serving("b", fleet={"timeout_s": 0.2}) as two,
    ):
        await_that(lambda: [place.state.value for place in traffic_of(two).health()] == ["absent"])
        await_that(lambda: are_ready(one))
        said: list[logging.LogRecord] = []
        told = f"peer tier {fleet.members['a'].address} is absent"
        await_that(lambda: bool(said.extend(one for one in caplog.records if told in one.message) or said))
    assert {record.levelno for record in said} == {logging.WARNING}
    assert "does not know our key" in said[0].message


def test_a_client_that_only_watches_opens_no_links(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    watcher = {fleet.members["b"].key: Guest(domain="", name="watcher")}
    remote = TcpSettings(address=fleet.members["a"].address, keys=fleet.keys["a"], guests=watcher)
    with fleet.serving("a", remote=remote), fleet.serving("b") as two:
        await_that(lambda: [place.state.value for place in traffic_of(two).health()] == ["absent"])
        assert "only a peer opens links" in traffic_of(two).health()[0].reason


def test_both_sides_must_say_whether_links_are_sealed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    with fleet.serving("a"), fleet.serving("b", fleet={"is_sealed": False}) as two:
        await_that(lambda: [place.state.value for place in traffic_of(two).health()] == ["absent"])
        assert "set peer_link = 'sealed'" in traffic_of(two).health()[0].reason


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistrySettings]:
    with serve_valkey(tmp_path / "registry") as server:
        valkey = ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=server.port), call_timeout_s=5.0)
        yield RegistrySettings(
            valkey=valkey, fleet="blue", secret=b"only the fleet knows", every_s=0.05, good_for_s=3600.0
        )


def test_servers_that_were_announced_are_let_in_and_share(tmp_path: Path, registry: RegistrySettings) -> None:
    fleet = Fleet(tmp_path, "a", "b", registry=registry)
    with fleet.serving("a") as one:
        await_that(lambda: one.core.domains[""].cache is not None)
        assert traffic_of(one).health() == []
        with fleet.serving("b") as two:
            await_that(lambda: len(traffic_of(one).health()) == len(traffic_of(two).health()) == 1)
            await_that(lambda: are_ready(one, two))
            fleet.save_at("a", one)
            with fleet.client("b") as client:
                assert client.wait_until_served(WAIT_S)
                assert load(client) == TOKENS
        # It has announced its end: from now on it is no member, and is not looked for.
        await_that(lambda: traffic_of(one).health() == [])
        assert fleet.places["a"].is_home(CHAIN).all()


def test_a_fleet_grows_by_one_server_after_the_other(
    tmp_path: Path, registry: RegistrySettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvoffload")
    fleet = Fleet(tmp_path, "a", "b", "c", registry=registry)
    with ExitStack() as stack:
        servers: list[CacheServer] = []
        for count, name in enumerate(fleet.members):
            servers.append(stack.enter_context(fleet.serving(name)))
            await_that(lambda count=count: all(len(traffic_of(one).health()) == count for one in servers))  # type: ignore[misc]
            await_that(lambda: are_ready(*servers))
            # Each has told of all others, though they are not those of which it told before.
            await_that(lambda count=count: caplog.text.count("is ready: ") >= count * (count + 1))  # type: ignore[misc]


def test_servers_with_one_key_are_both_told_by_log_and_state(
    tmp_path: Path, registry: RegistrySettings, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tmp_path, "a", "b", registry=registry)
    fleet.keys["b"] = fleet.keys["a"]
    fleet.members["b"] = replace(fleet.members["b"], key=fleet.members["a"].key)
    with fleet.serving("a") as one, fleet.serving("b") as two:
        for server, other in ((one, "b"), (two, "a")):
            line = f"another server, at {fleet.members[other].address}, announces itself with this server's key"
            await_that(lambda server=server: [at.name for at in traffic_of(server).health()] == ["this server"])  # type: ignore[misc]
            (told,) = traffic_of(server).health()
            assert told.reason == f"{line}; give each a key of its own"
            await_that(lambda line=line: f"peer tier this server is absent: {line}" in caplog.text)  # type: ignore[misc]
        with fleet.client("b") as client:
            assert client.wait_until_served(WAIT_S)
            (place,) = client.stats().places
            assert (place.tier, place.name, place.state) == ("peer", "this server", "absent")
        assert fleet.places["a"].is_home(CHAIN).all()
    assert caplog.text.count("announces itself with this server's key") == 2


@pytest.fixture
def fleet_of_two(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, "a", "b")


class TestClientOverPeers(OffloadCacheContract):
    """With a fleet below, nothing is another for an engine."""

    @pytest.fixture
    def cache(self, fleet_of_two: Fleet) -> Iterator[Any]:
        with (
            fleet_of_two.serving("a", domains=PAYING) as server,
            fleet_of_two.serving("b") as other,
            Client(make_settings(fleet_of_two.folder / "a")) as client,
        ):
            await_that(lambda: are_ready(server, other))
            assert client.wait_until_served(WAIT_S)
            yield Settled(client, server)
