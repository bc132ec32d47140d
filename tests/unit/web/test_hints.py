"""Hints over HTTP, as a real server's web process does them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.client import Client
from kvoffload.client.insight import ServerInsight
from kvoffload.errors import ServerError
from kvoffload.web.hint_envelope import read_envelope
from kvoffload.web.hints import Hints
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.asked import calls_to
from tests.kit.web.vllm_blocks import BLOCK, SEED, engine, name_blocks, save

TOKENS = list(range(1000, 1000 + 8 * BLOCK))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        yield tmp_path / "s"


@pytest.fixture
def joined(path: Path) -> Iterator[Client]:
    with engine(path) as client:
        save(client, name_blocks(TOKENS))
        yield client


@contextmanager
def hinting(path: Path) -> Iterator[Hints]:
    with calls_to(path) as calls:
        yield Hints(calls, "")


async def do(hints: Hints, kind: str, *, version: str = "1", **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    told = await hints.do(read_envelope({"protocol_version": "1", "message_id": "m", "actions": [action]}))
    assert told["message_id"] == "m"
    [one] = told["actions"]
    assert (one["action_id"], one["action_type"]) == ("a", kind)
    return dict(one)


async def outcome(hints: Hints, kind: str, **payload: Any) -> tuple[str, int]:
    [row] = (await do(hints, kind, **payload))["identities"]
    assert row["model"] == "made-up/model"
    return row["outcome"], row["tokens"]


async def test_each_action_does_what_it_says(path: Path, joined: Client) -> None:
    with hinting(path) as hints:
        prompt = {"tokens": TOKENS, "seed": SEED}
        assert await outcome(hints, "prefetch", **prompt) == ("done", 7 * BLOCK)
        assert await outcome(hints, "retain", **prompt, session="s", ttl_s=60) == ("done", 8 * BLOCK)
        told = await do(hints, "priority", session="s", priority=3)
        assert 0 < told["identities"][0]["ttl_s"] <= 60
        assert await outcome(hints, "hand_over", session="s", **prompt) == ("done", 8 * BLOCK)
        assert joined.insight().retained == 1
        assert await outcome(hints, "release", session="s") == ("done", 8 * BLOCK)
        assert await outcome(hints, "release", session="s") == ("nothing", 0)
        names = [name_blocks(TOKENS)[at : at + 32].hex() for at in range(0, 8 * 32, 32)]
        assert await outcome(hints, "retain", hashes=names, tokens=4 * BLOCK) == ("done", 4 * BLOCK)
        assert await outcome(hints, "release", hashes=names) == ("done", 4 * BLOCK)
        assert await outcome(hints, "retain", hashes=[]) == ("nothing", 0)
        told_by_server: ServerInsight = joined.insight()
        assert told_by_server.hints["release.done"] == 2
        assert (told_by_server.retained, told_by_server.retained_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["retain", "hand_over"])
async def test_a_prompt_without_a_block_is_not_the_sessions_former_one(path: Path, joined: Client, kind: str) -> None:
    with hinting(path) as hints:
        await outcome(hints, "retain", tokens=TOKENS, seed=SEED, session="s", ttl_s=60)
        for prompt in ({"tokens": TOKENS[: BLOCK - 1], "seed": SEED}, {"hashes": []}):
            assert await outcome(hints, kind, **prompt, session="s", ttl_s=600) == ("nothing", 0)
        told = await do(hints, "priority", session="s")
        assert 0 < told["identities"][0]["ttl_s"] <= 60


async def test_what_is_not_known_is_ignored_and_counted(path: Path, joined: Client) -> None:
    with hinting(path) as hints:
        assert (await do(hints, "move", what=7))["ignored"] == "unknown_action"
        assert (await do(hints, "retain", version="2"))["ignored"] == "unknown_version"
        assert hints.ignored == {"unknown_action": 1, "unknown_version": 1}
        assert joined.insight().hints == {}


async def test_an_identity_of_another_seed_is_told_why(path: Path, joined: Client) -> None:
    with hinting(path) as hints:
        [row] = (await do(hints, "retain", tokens=TOKENS, seed="8"))["identities"]
        assert row["outcome"] is None
        assert "PYTHONHASHSEED" in row["why"]
        assert (await do(hints, "retain", tokens=TOKENS, model="other"))["identities"] == []


async def test_without_a_server_it_is_said(tmp_path: Path) -> None:
    with calls_to(tmp_path / "s", is_served=False) as calls, pytest.raises(ServerError):
        await do(Hints(calls, ""), "release", session="s")
