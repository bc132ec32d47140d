"""A server is asked once for all who read at the same time, and its end is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvoffload.client.insight import AS_OPERATOR
from kvoffload.errors import ServerError
from kvoffload.protocol.message import Reply, Request
from kvoffload.web import watcher as watcher_module
from kvoffload.web.watcher import Watcher
from tests.kit.server.tiers import await_that, serving
from tests.kit.web import vllm_blocks
from tests.kit.web.asked import calls_to


async def test_many_readers_are_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "FRESH_S", 60.0)
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        with calls_to(tmp_path / "s") as calls:
            asked = []
            stats = calls.stats

            async def count() -> object:
                asked.append(1)
                return await stats()

            monkeypatch.setattr(calls, "stats", count)
            watcher = Watcher(calls)
            seen = await asyncio.gather(*(watcher.look() for _ in range(20)))
            assert len(asked) == 1
            assert all(one is seen[0] for one in seen)
            assert seen[0].stats is not None


async def test_engines_that_share_no_blocks_are_told_with_the_setting_that_differs(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        with vllm_blocks.engines_that_differ(tmp_path / "s"), calls_to(tmp_path / "s") as calls:
            seen = await Watcher(calls).look()
    assert seen.survey is not None
    assert seen.survey.find_differing() == ("made-up/model: hash_block_tokens 16 and 32",)


async def test_a_server_that_refuses_operators_questions_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "FRESH_S", 0.0)
    asked = []

    async def refuse(message: Request) -> Reply:
        asked.append(message)
        raise ServerError("not an operator", remedy=AS_OPERATOR)

    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        with calls_to(tmp_path / "s") as calls:
            monkeypatch.setattr(calls, "look_into", refuse)
            watcher = Watcher(calls)
            seen = [await watcher.look() for _ in range(3)]
    assert [one.survey for one in seen] == [None] * 3
    assert len(asked) == 1


async def test_a_server_that_is_away_says_why(tmp_path: Path) -> None:
    with calls_to(tmp_path / "s", is_served=False) as calls:
        seen = await Watcher(calls).look()
    assert seen.stats is None
    assert seen.fault
