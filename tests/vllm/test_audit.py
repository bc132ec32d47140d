"""`kvoffload audit` with a real `vllm serve`: right blocks pass, and damaged ones are found."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli.commands import run
from tests.kit.http_answers import Asked, answering
from tests.sglang.shared_records import zero_records
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import EnginePool
from tests.vllm.http_service import CONNECTOR, serving_with
from tests.vllm.tiny_models import DENSE, VOCAB_SIZE

pytestmark = pytest.mark.vllm

PROMPTS = 3
PROMPT_TOKENS = 641
ARGUMENTS = (
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory-bytes",
    str(16 << 20),
    "--enable-prompt-tokens-details",
)


@dataclass
class Between:
    """Passes requests on to an engine, and lets a test act when the engine's cache is empty."""

    address: str = ""
    act: Callable[[], None] | None = None
    """A call for the time when the cache was emptied for the first prompt."""
    resets: int = 0
    """How often the cache was emptied."""
    hides_cached: bool = False
    """Leaves out how much of a prompt was cached."""

    def change(self, path: str, data: bytes) -> bytes:
        if path == "/reset_prefix_cache" and json.loads(data)["success"]:
            self.resets += 1
            # The first time is before the first prompt is asked at all.
            if self.act is not None and self.resets == 2:
                self.act()
        if path == "/v1/completions" and self.hides_cached:
            told = json.loads(data)
            del told["usage"]["prompt_tokens_details"]
            return json.dumps(told).encode()
        return data

    def audit(self, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        self.resets = 0
        done = run("audit", self.address, "--prompts", str(PROMPTS), "--json", *arguments)
        print(done.stdout, done.stderr)
        return done, json.loads(done.stdout)


@contextmanager
def passing_on(port: int) -> Iterator[Between]:
    between = Between()

    def answer(asked: Asked) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(asked.method, asked.path, asked.body, {"Content-Type": "application/json"})
            told = connection.getresponse()
            return told.status, between.change(asked.path, told.read())
        finally:
            connection.close()

    with answering(answer) as between.address:
        yield between


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with SharedServer(tmp_path_factory.mktemp("audited")) as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def engine(engines: EnginePool, server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    extra = {name: value for name, value in CONNECTOR["kv_connector_extra_config"].items() if name != "memory"}  # type: ignore[attr-defined]
    connector = CONNECTOR | {"kv_connector_extra_config": extra | {"server": str(server.socket)}}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING_")}
    with (
        serving_with(
            environment | {"VLLM_SERVER_DEV_MODE": "1"},
            engines.model_folder(DENSE),
            tmp_path_factory.mktemp("audit") / "log",
            *ARGUMENTS,
            connector=connector,
            patience=2.0,
        ) as service,
        passing_on(service.port) as between,
    ):
        yield between


MADE = ("--tokens", str(PROMPT_TOKENS), "--token-ids", f"3-{VOCAB_SIZE - 1}")


@pytest.mark.parametrize("hides_cached", [False, True])
def test_restored_answers_of_a_right_engine_agree(engine: Between, hides_cached: bool) -> None:
    engine.hides_cached = hides_cached
    try:
        done, row = engine.audit(*MADE)
    finally:
        engine.hides_cached = False
    assert (done.returncode, row["restored"], row["agreed"], row["other_lengths"]) == (0, PROMPTS, PROMPTS, 0)
    assert (row["own_hits_equal"], row["largest_difference"]) == (True, 0)
    assert row["not_audited"] == {}


def test_prompts_of_a_file_are_audited_again_and_again(engine: Between, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = [f"{number}. " + "The engine asks for a prefix of the cache. " * 20 for number in range(PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    for _ in range(2):
        done, row = engine.audit("--file", str(file))
        assert (done.returncode, row["restored"], row["agreed"]) == (0, PROMPTS, PROMPTS)


def test_zeros_in_the_records_are_found(engine: Between, server: SharedServer) -> None:
    def damage() -> None:
        zero_records(server)

    engine.act = damage
    try:
        done, row = engine.audit(*MADE)
    finally:
        engine.act = None
    assert (done.returncode, row["restored"], row["disagreed"]) == (1, PROMPTS, PROMPTS)
    assert row["own_hits_equal"]
    found = row["first_disagreement"]
    assert (found["prompt"], found["own_hit"] == found["restored"]) == (1, False)
    assert row["largest_difference"] > 0.1
