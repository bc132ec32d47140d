"""How much of a prompt is there, as a real server's web process tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ServerError
from kvoffload.protocol.survey import FindPrefix
from kvoffload.server.loop import CacheServer
from kvoffload.web import prompt_chains
from kvoffload.web.prefix_question import read_body
from kvoffload.web.prefixes import Prefixes
from tests.kit.cache.cache_model import fingerprint
from tests.kit.server.tiers import await_that, counts_of, disk_below, serving
from tests.kit.web.asked import calls_to
from tests.kit.web.vllm_blocks import BLOCK, engine, name_blocks, save

TOKENS = list(range(1000, 1000 + 10 * BLOCK))


@contextmanager
def asking(path: Path) -> Iterator[Prefixes]:
    with calls_to(path) as calls:
        yield Prefixes(calls, "")


@contextmanager
def one_server(path: Path, **options: Any) -> Iterator[CacheServer]:
    with serving(path, **options) as server:
        await_that(lambda: server.has_memory)
        yield server


async def ask(asked: Prefixes, **given: Any) -> list[dict[str, Any]]:
    found = await asked.answer(read_body(given))
    json.dumps(found.prompts)
    [rows] = found.prompts
    return list(rows)


async def test_tokens_and_hashes_have_the_same_answer(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path) as client:
        hashes = name_blocks(TOKENS)
        save(client, hashes[: 6 * 32])
        with asking(path) as asked:
            [row] = await ask(asked, tokens=TOKENS, seed="7")
            assert row == {
                "identity": fingerprint("made-up/model").hex()[:12],
                "model": "made-up/model",
                "block_tokens": BLOCK,
                "asked_tokens": 160,
                "hit_tokens": 96,
                "reaches": {"memory": 96},
            }
            names = [hashes[at : at + 32].hex() for at in range(0, len(hashes), 32)]
            assert await ask(asked, hashes=names) == [row]
            assert (await ask(asked, hashes=names, limit=50))[0]["hit_tokens"] == 48
            assert (await ask(asked, tokens=TOKENS[:96], seed="7"))[0]["hit_tokens"] == 80
            assert (await ask(asked, tokens=TOKENS, seed="7", alignment=64))[0]["hit_tokens"] == 64
            assert (await ask(asked, tokens=[5, *TOKENS], seed="7"))[0]["hit_tokens"] == 0


async def test_a_salt_and_a_tenant_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path) as client:
        save(client, name_blocks(TOKENS, salt="s"))
        save(client, name_blocks(TOKENS[:64], tenant="t"))
        with asking(path) as asked:
            for given, hit in (({}, 0), ({"salt": "s"}, 144), ({"tenant": "t"}, 64), ({"salt": "s", "tenant": "t"}, 0)):
                [row] = await ask(asked, tokens=TOKENS, seed="7", **given)
                assert row["hit_tokens"] == hit


async def test_identities_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path, "one") as one, engine(path, "two", seed="8") as _, engine(path, "three"):
        save(one, name_blocks(TOKENS))
        with asking(path) as asked:
            rows = await ask(asked, tokens=TOKENS, seed="7")
            assert [(row["model"], row["hit_tokens"]) for row in rows] == [("one", 144), ("two", None), ("three", 0)]
            assert "PYTHONHASHSEED" in rows[1]["why"]
            assert [row["model"] for row in await ask(asked, hashes=[], model="two")] == ["two"]
            assert await ask(asked, hashes=[], model="four") == []
            [row] = await ask(asked, hashes=[], identity=fingerprint("three").hex()[:5])
            assert (row["model"], row["hit_tokens"], row["asked_tokens"]) == ("three", 0, 0)


async def test_what_only_an_engine_can_hash_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path, algorithm="xxhash"), asking(path) as asked:
        [row] = await ask(asked, tokens=TOKENS, seed="7")
        assert row["hit_tokens"] is None
        assert "ask with hashes" in row["why"]
        assert (await ask(asked, hashes=["aa" * 32]))[0]["hit_tokens"] == 0


async def test_of_several_prompts_each_has_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path) as client:
        save(client, name_blocks(TOKENS))
        with asking(path) as asked:
            prompts = [{"tokens": TOKENS[:length]} for length in (16, 17, 100, 160)]
            found = await asked.answer(read_body({"prompts": prompts, "seed": "7"}))
            assert [[row["hit_tokens"] for row in rows] for rows in found.prompts] == [[0], [16], [96], [144]]


async def test_a_disk_adds_to_what_memory_has(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (tmp_path / "d").mkdir(mode=0o700)
    tiers = {"": [disk_below(tmp_path / "d")]}
    with one_server(path, tiers=tiers) as server, engine(path) as saving:
        hashes = name_blocks(TOKENS)
        save(saving, hashes)
        await_that(lambda: counts_of(server)["written"] == 10)
        with calls_to(path) as calls, asking(path) as asked:
            assert await calls.clear() == 10
            [row] = await ask(asked, tokens=TOKENS, seed="7")
            assert (row["hit_tokens"], row["reaches"]) == (144, {"memory": 0, "disk": 144})


async def test_of_too_many_identities_some_are_looked_at_and_the_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_chains, "MAX_IDENTITIES", 1)
    path = tmp_path / "s"
    with one_server(path), engine(path, "one"), engine(path, "two"), asking(path) as asked:
        for model, names, is_partial in (("", ["one"], True), ("two", ["two"], False)):
            found = await asked.answer(read_body({"hashes": [], "model": model}))
            assert ([row["model"] for row in found.prompts[0]], found.is_partial) == (names, is_partial)


async def test_without_a_server_nothing_is_told(tmp_path: Path) -> None:
    with calls_to(tmp_path / "s", is_served=False) as calls, pytest.raises(ServerError):
        await ask(Prefixes(calls, ""), tokens=TOKENS)


async def test_a_new_server_numbers_its_identities_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_chains, "FRESH_S", 2.0**40)
    path = tmp_path / "s"
    with calls_to(path, is_served=False) as calls:
        client, asked, former = calls.client, Prefixes(calls, ""), 0
        for name in ("one", "two"):
            with one_server(path), engine(path, name):
                async with asyncio.timeout(30):
                    while not (client.is_served and client.link.boot_id != former):
                        await asyncio.sleep(0.01)
                assert [row["model"] for row in await ask(asked, hashes=[])] == [name]
                former = client.link.boot_id


async def test_what_two_servers_said_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with one_server(path), engine(path), calls_to(path) as calls:
        look_into = calls.look_into

        async def look_and_change(message: Any) -> Any:
            found = await look_into(message)
            if isinstance(message, FindPrefix):
                calls.client.link.boot_id += 1
            return found

        monkeypatch.setattr(calls, "look_into", look_and_change)
        with pytest.raises(ServerError, match="was replaced"):
            await ask(Prefixes(calls, ""), hashes=["aa" * 32])
