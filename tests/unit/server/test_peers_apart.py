"""Peers that are killed, stopped or cut off, a network that delays and loses: misses, in time, never wrong bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.cache import CacheStats
from kvoffload.client import Client
from tests.kit.cache.offload_contract import TOKENS, save
from tests.kit.fleet_of_two import fleet_of_two
from tests.kit.machines import Network, two_machines, why_not
from tests.kit.server.remote_loads import load
from tests.unit.client.conftest import make_settings
from tests.vllm.cache_server import SharedServer

MISSING = why_not()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

WAIT_S = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    with two_machines() as made:
        yield made


Servers = tuple[SharedServer, SharedServer]


@pytest.fixture
def servers(tmp_path: Path, network: Network) -> Iterator[Servers]:
    with fleet_of_two(tmp_path, network, memory="64MiB", remote_timeout="3s", remote_connections="2") as made:
        yield made


def client_of(server: SharedServer) -> Client:
    return Client(make_settings(server.socket, name="one model"))


def state_of(stats: CacheStats) -> str:
    [place] = stats.places
    return place.state


def await_stats(client: Client, state: str, *, written: int = 0) -> CacheStats:
    end_s = time.monotonic() + WAIT_S
    while True:
        stats = client.stats()
        if state_of(stats) == state and stats.traffic["peer"]["written"] >= written:
            return stats
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)


def save_on(server: SharedServer, *, is_lossless: bool = True) -> None:
    """Saves the chain, and waits until the other server has the blocks whose home it is."""
    with client_of(server) as client:
        assert client.wait_until_served(WAIT_S)
        await_stats(client, "ready")
        save(client)
        client.stats()
        end_s = time.monotonic() + WAIT_S
        while (stats := client.stats()).traffic["peer"]["waiting_bytes"]:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        traffic = stats.traffic["peer"]
        assert not is_lossless or (traffic["written"] > 0 and not traffic["failed"]), traffic


def test_a_slow_network_that_loses_packets_brings_the_right_bytes(servers: Servers, network: Network) -> None:
    network.wire.delay_s, network.wire.loss = 0.003, 0.03
    one, other = servers
    save_on(one, is_lossless=False)
    with client_of(other) as client:
        assert client.wait_until_served(WAIT_S)
        await_stats(client, "ready")
        # Records that were lost for too long are misses; `load` checks that those that come are right.
        assert load(client) in range(TOKENS + 1)
        network.wire.delay_s, network.wire.loss = 0.0, 0.0
        await_stats(client, "ready")
        load(client)
        assert client.stats().traffic["peer"]["quarantined"] == 0


def test_a_peer_that_is_cut_off_is_a_miss_and_comes_back(servers: Servers, network: Network) -> None:
    one, other = servers
    save_on(one)
    with client_of(other) as client:
        assert client.wait_until_served(WAIT_S)
        await_stats(client, "ready")
        # Some of the prompt lives here; not all of it does.
        network.wire.loss = 1.0
        assert load(client) < TOKENS
        await_stats(client, "absent")
        # The absent server is not waited for: blocks that this server lacks are misses.
        assert load(client) < TOKENS
        save(client)
        assert load(client) == TOKENS
        network.wire.loss = 0.0
        await_stats(client, "ready")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_is_killed_or_stopped_is_a_miss(servers: Servers, how: str) -> None:
    one, other = servers
    save_on(one)
    with client_of(other) as client:
        assert client.wait_until_served(WAIT_S)
        await_stats(client, "ready")
        one.kill() if how == "kill" else one.stop()
        assert load(client) < TOKENS
        await_stats(client, "absent")
        one.start() if how == "kill" else one.go_on()
        await_stats(client, "ready")
        found = load(client)
        assert found == TOKENS if how == "stop" else found < TOKENS
