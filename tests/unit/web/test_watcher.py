"""A server is asked once for all who read at the same time, and its end is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvoffload.client.async_client import AsyncClient
from kvoffload.client.joining import Member
from kvoffload.client.terms import ClientTerms
from kvoffload.protocol import Role
from kvoffload.web import watcher as watcher_module
from kvoffload.web.watcher import Watcher
from tests.kit.server.tiers import await_that, serving

MEMBER = Member(engine="web", role=Role.OBSERVER)


async def test_many_readers_are_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "FRESH_S", 60.0)
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        async with AsyncClient(ClientTerms(socket=tmp_path / "s", member=MEMBER)) as client:
            assert await client.wait_until_served(30)
            asked = []
            stats = client.stats

            async def count() -> object:
                asked.append(1)
                return await stats()

            monkeypatch.setattr(client, "stats", count)
            watcher = Watcher(client)
            seen = await asyncio.gather(*(watcher.look() for _ in range(20)))
            assert len(asked) == 1
            assert all(one is seen[0] for one in seen)
            assert seen[0].stats is not None


async def test_a_server_that_is_away_says_why(tmp_path: Path) -> None:
    async with AsyncClient(ClientTerms(socket=tmp_path / "s", member=MEMBER)) as client:
        seen = await Watcher(client).look()
    assert seen.stats is None
    assert seen.fault
