"""Answers at each path, for a real server that comes and goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload.cache import Ask
from kvoffload.config.sources import load_settings
from kvoffload.metrics.exposition import OPEN_TYPE
from kvoffload.server.loop import CacheServer
from kvoffload.web.application import Application, hide_secrets
from kvoffload.web.hints import Hints
from kvoffload.web.http_message import HttpError, Response
from kvoffload.web.prefixes import Prefixes
from kvoffload.web.watcher import Watcher
from tests.kit.cache.cache_model import make_chain
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.asked import TOKEN, ask, calls_to
from tests.kit.web.prompt_load import BLOCK, PromptLoad

WAIT_S = 30.0


@contextmanager
def application(path: Path, *, token: str = "") -> Iterator[Application]:
    loaded = load_settings(flags={"server": str(path)})
    with calls_to(path, is_served=False) as calls:
        yield Application(Watcher(calls), Prefixes(calls, token), Hints(calls, token), loaded, token=token)


async def get(app: Application, path: str, **headers: str) -> tuple[int, Response]:
    found = await app.router.answer(ask("GET", path, **headers))
    return found.status, found


async def await_ready(app: Application, wanted: int) -> Response:
    async with asyncio.timeout(WAIT_S):
        while True:
            status, found = await get(app, "/readyz")
            if status == wanted:
                return found
            await asyncio.sleep(0.02)


def numbers_of(found: Response) -> dict[str, float]:
    families = text_string_to_metric_families(found.body.decode())
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in families
        for sample in family.samples
    }


async def test_a_server_is_told_of_and_so_is_its_end(tmp_path: Path) -> None:
    with application(tmp_path / "s") as app:
        with serving(tmp_path / "s") as server:
            await_that(lambda: server.has_memory)
            assert json.loads((await await_ready(app, 200)).body) == {"ready": True}
            stats = json.loads((await get(app, "/stats"))[1].body)
            numbers = numbers_of((await get(app, "/metrics"))[1])
            assert numbers["kvoffload_server_up[]"] == 1
            assert numbers["kvoffload_capacity_bytes['', 'memory']"] == stats["memory"]["capacity_bytes"] > 0
            assert numbers["kvoffload_sessions[]"] == stats["sessions"]
            opened = await get(app, "/metrics", accept="application/openmetrics-text; version=1.0.0")
            assert opened[1].content_type == OPEN_TYPE
        gone = json.loads((await await_ready(app, 503)).body)
        assert (gone["ready"], bool(gone["why"])) == (False, True)
        assert numbers_of((await get(app, "/metrics"))[1]) == {"kvoffload_server_up[]": 0}
        assert (await get(app, "/stats"))[0] == 503
        assert (await get(app, "/healthz"))[0] == 200


async def test_a_drain_reaches_the_server(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app, serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        await await_ready(app, 200)
        found = await app.router.answer(ask("POST", "/drain", authorization=f"Bearer {TOKEN}"))
        assert found.status == 202
        assert json.loads(found.body)["leases"] == 0
        assert is_ending(server)


def is_ending(server: CacheServer) -> bool:
    await_that(lambda: server.core.is_draining)
    return True


async def test_without_a_server_a_drain_is_refused_in_one_line(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app:
        with pytest.raises(HttpError) as fault:
            await app.router.answer(ask("POST", "/drain", authorization=f"Bearer {TOKEN}"))
        assert fault.value.status == 502
        assert "\n" not in str(fault.value)


def test_settings_are_shown_without_names_of_users() -> None:
    loaded = load_settings(flags={"valkey": "valkeys://alice@cache.example:6379", "memory": "1GiB"})
    shown: dict[str, Any] = dict(hide_secrets(loaded))
    assert shown["valkey"]["value"] == "valkeys://***@cache.example:6379/0"
    assert shown["memory"] == {"value": "1GiB", "source": "flag"}
    assert "alice" not in json.dumps(shown)


async def act(app: Application, path: str, body: object = None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    data = b"" if body is None else json.dumps(body).encode()
    found = await app.router.answer(ask("POST", path, body=data, **headers))
    return dict(json.loads(found.body))


async def test_memory_is_cleared_and_quotas_are_set_through_the_server(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app, serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        await await_ready(app, 200)
        assert await act(app, "/clear") == {"blocks": 0}
        with pytest.raises(HttpError, match="tenant 'nobody' has no quota") as fault:
            await act(app, "/quota", {"tenant": "nobody", "quota_bytes": 5})
        assert fault.value.status == 502


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tenant": "a"},
        {"tenant": "a", "quota_bytes": 0},
        {"tenant": "a", "quota_bytes": True},
        {"tenant": "a", "quota_bytes": 2**64},
        {"tenant": "", "quota_bytes": 1},
        {"tenant": "x" * 65, "quota_bytes": 1},
        {"tenant": "a\n", "quota_bytes": 1},
        {"tenant": "a", "quota_bytes": 1, "more": 1},
    ],
)
async def test_a_wrong_quota_is_refused_here(tmp_path: Path, body: dict[str, Any]) -> None:
    with application(tmp_path / "s", token=TOKEN) as app:
        with pytest.raises(HttpError, match="quota_bytes") as fault:
            await act(app, "/quota", body)
        assert fault.value.status == 400


async def test_stats_and_metrics_tell_of_prompts(tmp_path: Path) -> None:
    with application(tmp_path / "s") as app, serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        await await_ready(app, 200)
        prompts = json.loads((await get(app, "/stats"))[1].body)["prompts"]
        assert (prompts["hit_rate"], prompts["hit_ceiling"], prompts["asked_blocks"]) == (None, None, 0)
        numbers = numbers_of((await get(app, "/metrics"))[1])
        assert numbers["kvoffload_call_seconds_count['acquire']"] == 0


async def test_agents_sessions_are_told_with_the_token_alone(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app:
        with serving(tmp_path / "s") as server:
            await_that(lambda: server.has_memory)
            await await_ready(app, 200)
            load = PromptLoad(tmp_path / "s")
            for _ in range(2):
                load.turn(conversations=2, session="agent")
            request = ask("GET", "/v1/sessions", authorization=f"Bearer {TOKEN}")

            async def rows(**query: str) -> list[dict[str, Any]]:
                told = await app.router.answer(replace(request, head=replace(request.head, query=query)))
                found: list[dict[str, Any]] = json.loads(told.body)["sessions"]
                return found

            async with asyncio.timeout(WAIT_S):
                while [(one["session"], one["turns"]) for one in await rows()] != [("agent", 2)]:
                    await asyncio.sleep(0.02)
            load.close()
            assert (await rows(session="agent"))[0]["asked_tokens"] > 0
            assert await rows(session="other") == []
        with pytest.raises(HttpError) as fault:
            await app.router.answer(ask("GET", "/v1/sessions"))
        assert fault.value.status == 401


async def test_the_ledger_is_told_with_the_token_alone(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app:
        with serving(tmp_path / "s") as server:
            await_that(lambda: server.has_memory)
            await await_ready(app, 200)
            load = PromptLoad(tmp_path / "s", model="made-up")
            load.turn(conversations=1, session="agent")
            request = ask("GET", "/ledger", authorization=f"Bearer {TOKEN}")
            async with asyncio.timeout(WAIT_S):
                while True:
                    told = json.loads((await app.router.answer(request)).body)
                    is_told = told["total"]["asked_tokens"] and told["models"][0]["written_bytes"]
                    if is_told and len(told["sessions"]) == 2:
                        break
                    await asyncio.sleep(0.02)
            load.close()
            for kind, name in (("tenants", ""), ("models", "made-up"), ("sessions", "agent")):
                (row, rest) = told[kind]
                assert (row["name"], row["asked_tokens"]) == (name, told["total"]["asked_tokens"])
                assert (rest["name"], rest["asked_tokens"]) == (None, 0)
            numbers = numbers_of((await get(app, "/metrics"))[1])
            key = "kvoffload_ledger_asked_tokens_total['made-up', 'model']"
            assert numbers[key] == told["total"]["asked_tokens"]
        with pytest.raises(HttpError) as fault:
            await app.router.answer(ask("GET", "/ledger"))
        assert fault.value.status == 401


async def test_how_much_of_a_prompt_is_there_is_told_with_the_token_alone(tmp_path: Path) -> None:
    with application(tmp_path / "s", token=TOKEN) as app:
        with serving(tmp_path / "s") as server:
            await_that(lambda: server.has_memory)
            await await_ready(app, 200)
            load = PromptLoad(tmp_path / "s", model="made-up")
            load.turn(conversations=1)
            chain = make_chain(0, 24)
            hashes = [chain[at : at + 32].hex() for at in range(0, len(chain), 32)]
            await_that(lambda: load.client.stats().readable > 0)
            there = load.client.find_boundary(Ask(chain))
            found = await act(app, "/v1/prefix", {"hashes": hashes})
            load.close()
            [row] = found["identities"]
            assert (row["model"], row["asked_tokens"], row["hit_tokens"]) == ("made-up", 24 * BLOCK, there)
            assert await act(app, "/v1/prefix", {"prompts": [{"hashes": hashes}] * 2}) == {"prompts": [found] * 2}
            query = {"hashes": ",".join(hashes[:2]), "model": "made-up"}
            request = ask("GET", "/v1/prefix", authorization=f"Bearer {TOKEN}")
            told = await app.router.answer(replace(request, head=replace(request.head, query=query)))
            assert json.loads(told.body)["identities"][0]["hit_tokens"] == 2 * BLOCK
        for method in ("GET", "POST"):
            with pytest.raises(HttpError) as fault:
                await app.router.answer(ask(method, "/v1/prefix"))
            assert fault.value.status == 401
