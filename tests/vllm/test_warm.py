"""`kvoffload warm` with a real `vllm serve` and a shared server: prompts are in the pool, and are found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cache import CacheSettings
from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.kit.cli.commands import run
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that
from tests.kit.server.tiers import serving as serving_blocks
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.http_service import CONNECTOR, serving
from tests.vllm.served_prompts import PROMPT_TOKENS, RESTORABLE
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

PROMPTS = 12
ENGINE_BYTES = 32 << 20
"""The engine's own cache has room for as many."""
MEMORY = CacheSettings(memory_bytes=256 << 20, segment_bytes=64 << 20, extent_bytes=64 << 10)


def test_prompts_of_a_file_are_in_the_pool_afterwards(engines: EnginePool, tmp_path: Path) -> None:
    token, file, socket = tmp_path / "token", tmp_path / "prompts.jsonl", tmp_path / "s"
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(7300, 7300 + PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": prompt, "pin_s": 60}) + "\n" for prompt in prompts))
    extra = {name: value for name, value in CONNECTOR["kv_connector_extra_config"].items() if name != "memory"}
    connector = CONNECTOR | {"kv_connector_extra_config": extra | {"server": str(socket)}}
    with (
        serving_blocks(socket, MEMORY) as server,
        web(socket, f"http_token_file={token}") as cache,
        serving(
            engines.model_folder(DENSE),
            tmp_path / "log",
            *("--kv-cache-memory-bytes", str(ENGINE_BYTES)),
            connector=connector,
        ) as engine,
    ):
        await_that(lambda: server.has_memory)
        await_that(lambda: get(f"{cache}/readyz")[0] == 200)
        address = f"http://127.0.0.1:{engine.port}"
        options = ["--engine", address, "--cache", cache, "--token-file", str(token), "--json"]
        done = run("warm", str(file), *options)
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert (row["prompts"], row["failed"], row["there_before"]) == (PROMPTS, 0, 0)
        assert row["tokens"] == PROMPTS * PROMPT_TOKENS
        assert 0 < row["there"] == row["warmed"] <= PROMPTS * RESTORABLE
        again = json.loads(run("warm", str(file), *options).stdout)
        # On a machine that is busy saves take longer than was waited for, and some find no room.
        assert again["there"] >= again["there_before"] >= row["there"]
