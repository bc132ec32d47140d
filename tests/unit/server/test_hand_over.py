"""A fleet whose servers are started again one after the other, with no engine that keeps their memory."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from pathlib import Path

from kvoffload.cache import Ask
from kvoffload.server.loop import CacheServer
from tests.kit.cache.cache_model import make_chain
from tests.kit.cache.offload_contract import TOKENS, names_of, save
from tests.kit.server.fleets import Fleet
from tests.kit.server.tiers import FAR, WAIT_S, await_that, traffic_of

CHAINS = [make_chain(number, 16) for number in range(1, 13)]
BLOCKS = 16 + 8 + 4


def are_ready(*servers: CacheServer) -> bool:
    return all(one.state.value == "ready" for server in servers for one in traffic_of(server).health())


def count_at_home(fleet: Fleet, servers: dict[str, CacheServer]) -> int:
    """Counts the blocks of all prompts that are in the memory of the server that is their home."""
    count = 0
    for name, server in servers.items():
        cache = server.core.domains[""].cache
        assert cache is not None
        for space in traffic_of(server).spaces:
            for chain, group in product(CHAINS, range(3)):
                hashes = names_of(group, chain)
                there = cache.lookup(space.number, group, hashes)
                count += int((there & fleet.places[name].is_home(hashes)).sum())
    return count


def count_hits(fleet: Fleet) -> int:
    """Counts the tokens that engines at all servers find, each those of the prompts that it has computed."""
    count = 0
    for at, name in enumerate(fleet.members):
        with fleet.client(name) as client:
            assert client.wait_until_served(WAIT_S)
            for chain in CHAINS[at::3]:
                found = client.acquire(Ask(chain), far=FAR)
                count += found.boundary
                if found.lease is not None:
                    client.release(found.lease)
    return count


def test_after_a_rolling_restart_engines_hit_what_they_hit_before(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    with ExitStack() as stack:
        stacks = {name: stack.enter_context(ExitStack()) for name in fleet.members}

        def start(name: str) -> CacheServer:
            return stacks[name].enter_context(fleet.serving(name, hand_over_s=60.0))

        servers = {name: start(name) for name in fleet.members}
        await_that(lambda: are_ready(*servers.values()))
        for at, (name, server) in enumerate(servers.items()):
            with fleet.client(name) as client:
                assert client.wait_until_served(WAIT_S)
                for chain in CHAINS[at::3]:
                    save(client, chain)
                await_that(lambda server=server: traffic_of(server).is_idle)  # type: ignore[misc]
        before = count_hits(fleet)
        assert before == len(CHAINS) * TOKENS
        await_that(lambda: not any(one.processes for server in servers.values() for one in server.core.sessions))
        blocks = count_at_home(fleet, servers)
        assert blocks == BLOCKS * len(CHAINS)
        for name in fleet.members:
            # No engine keeps the memory of a node that leaves.
            stacks[name].close()
            others = [server for other, server in servers.items() if other != name]
            await_that(lambda others=others: not any(are_ready(server) for server in others))  # type: ignore[misc]
            servers[name] = start(name)
            await_that(lambda: are_ready(*servers.values()))
            await_that(lambda: count_at_home(fleet, servers) == blocks)
        assert count_hits(fleet) == before
