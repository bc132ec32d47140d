"""The same contract in an asyncio loop; and what only there can happen: calls at once, and cancelled ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import Ask
from kvoffload.client import AsyncClient, LinkState
from kvoffload.client.private_server import find_or_start
from kvoffload.config.sources import Settings
from kvoffload.errors import PrivateServerError, ServerError
from kvoffload.protocol import EventsLost, Role, Stored
from kvoffload.protocol.message import Event
from kvoffload.units import MIB
from tests.kit.cache.offload_contract import CHAIN, TOKENS, OffloadCacheContract, save
from tests.kit.children import child, stop
from tests.kit.client.served import WAIT_S, find_servers, wait_for
from tests.unit.client.conftest import SERVER, make_settings


async def served(path: Path, **options: Any) -> AsyncClient:
    client = await AsyncClient(make_settings(path, **options)).start()
    assert await client.wait_until_served(WAIT_S), client.fault
    return client


class TestAsyncClient(OffloadCacheContract):
    @pytest.fixture
    async def cache(self, socket_path: Path) -> AsyncIterator[Any]:
        client = await served(socket_path)
        async with await served(socket_path, role=Role.OBSERVER) as observer:
            yield client
            await client.close()
            async with asyncio.timeout(WAIT_S):
                while (await observer.stats()).leases:
                    await asyncio.sleep(0.005)


async def test_calls_go_on_side_by_side(socket_path: Path) -> None:
    async with await served(socket_path) as client:
        await save(client)
        found = await asyncio.gather(*(client.acquire(Ask(CHAIN)) for _ in range(100)))
        assert {one.boundary for one in found} == {TOKENS}
        assert len({one.lease for one in found}) == 100
        assert (await client.stats()).leases == 100
        for one in found:
            assert one.lease is not None
            client.release(one.lease)
        assert (await client.stats()).leases == 0


async def test_a_server_is_drained_from_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = await served(path)
        await save(client)
        client.prefetch(Ask(CHAIN))
        leased = await client.acquire(Ask(CHAIN))
        assert leased.lease is not None
        assert (await client.drain()).leases == 1
        assert not (await client.acquire(Ask(CHAIN))).is_hit
        client.release(leased.lease)
        await client.close()
        assert server.wait(WAIT_S) == 0


async def test_a_cancelled_call_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = await served(path)
        await save(client)
        stop(server)
        calls = [asyncio.ensure_future(call) for call in (client.acquire(Ask(CHAIN)), client.reserve(0, count=3))]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [asyncio.CancelledError] * 2
        server.send_signal(signal.SIGCONT)
        # The answers come before those of the first counts, and what they brought goes back before the second ones.
        await client.stats()
        stats = await client.stats()
        assert (stats.hits, stats.leases, stats.reserved) == (1, 0, 0)
        await client.close()


async def test_it_joins_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    told: list[Event] = []
    router = AsyncClient(make_settings(path, role=Role.OBSERVER), on_event=lambda event, _: told.append(event))
    with pytest.raises(ServerError, match="did not answer"):
        await router.stats()
    with child(["-c", SERVER, str(path), "0"], says="serves") as server:
        client = await served(path)
        await router.start()
        assert await router.wait_until_served(WAIT_S)
        router.subscribe()
        await router.stats()
        await save(client)
        memory_id = client.memory_id
        while not any(isinstance(event, Stored) for event in told):
            await asyncio.sleep(0.01)
        server.kill()
        server.wait()
        while client.is_served or router.is_served:
            await asyncio.sleep(0.01)
        assert client.lookup(0, CHAIN).all()
        assert not (await client.acquire(Ask(CHAIN))).is_hit
    with child(["-c", SERVER, str(path), "60"], says="serves"):
        assert await client.wait_until_served(WAIT_S)
        assert await router.wait_until_served(WAIT_S)
        assert client.memory_id == memory_id
        assert (await client.acquire(Ask(CHAIN))).boundary == TOKENS
        await client.close()
        await router.close()
    assert client.link.state is LinkState.CLOSED
    assert any(isinstance(event, EventsLost) for event in told)


def test_a_loop_that_has_ended_is_told_nothing(socket_path: Path) -> None:
    client = asyncio.run(served(socket_path))
    for _ in range(2):
        client.wire.on_unsent()
        wait_for(lambda: not client.connection.is_woken)
    asyncio.run(client.close())
    assert client.link.state is LinkState.CLOSED


async def test_a_private_server_is_found_beside_the_loop(tmp_path: Path) -> None:
    settings = Settings(memory=64 * MIB, segment_size=64 * MIB, log_level="warning")
    asked: list[bool] = []

    def find(holds_memory: bool) -> Path:
        asked.append(holds_memory)
        if len(asked) == 1:
            raise PrivateServerError("not now", remedy="wait")
        return find_or_start(settings, tmp_path, holds_memory=holds_memory)

    async with AsyncClient(replace(make_settings(tmp_path), socket=find)) as client:
        assert await client.wait_until_served(WAIT_S), client.fault
        await save(client)
        (server,) = find_servers(tmp_path)
    os.kill(server, signal.SIGTERM)
    while find_servers(tmp_path):
        await asyncio.sleep(0.01)
    assert asked == [False, False]
