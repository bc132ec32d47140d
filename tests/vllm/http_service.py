"""`vllm serve` in a process of its own, and what a client of it asks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from tests.kit.free_ports import free_port
from tests.vllm.connector_probe import PATIENCE
from tests.vllm.engine import ENVIRONMENT
from tests.vllm.tiny_models import DENSE

START_S = 180.0
ANSWER_S = 60.0
END_S = 30.0
CLEAR_MARGIN = 0.2
CONNECTOR = {
    "kv_connector": "KVOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"memory": "256MiB", **PATIENCE},
}
UNCHANGED = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
"""Our connector as a user has it who sets nothing."""
USERS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # without it vLLM wants nearly all memory and refuses to start
    "VLLM_SERVER_DEV_MODE": "1",  # for the reset over HTTP
}
USERS_ARGUMENTS = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", "4096")
"""vLLM has no prefix caching for hybrid models unless it is told so."""


@dataclass(frozen=True)
class Streamed:
    """An answer came in pieces of text; `margin` says how far its least certain token was ahead of the next likeliest.

    Which requests share a step decides how the engine's own kernels round. Its numbers have steps of 1/32 and 1/16
    here, so answers are compared where the margin is clear.
    """

    pieces: list[str]
    margin: float

    @property
    def is_clear(self) -> bool:
        return self.margin >= CLEAR_MARGIN

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Service:
    """A running `vllm serve`, and what it has written."""

    port: int
    log: Path
    answer_s: float = ANSWER_S
    """How long an answer may take."""

    def ask(self, path: str, body: dict[str, object] | None = None, *, headers: Mapping[str, str] | None = None) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=self.answer_s)
        try:
            connection.request(
                "GET" if body is None else "POST",
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", **(headers or {})},
            )
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()

    def ask_for_cached(self, prompt: list[int]) -> int:
        """Asks for one token, and returns how many of the prompt's were not computed."""
        body = {"model": DENSE.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        usage = json.loads(self.ask("/v1/completions", body))["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def reset(self) -> bool:
        """Drops the engine's own cache. False: some of its blocks are in use."""
        return bool(json.loads(self.ask("/reset_prefix_cache", {}))["success"])

    def stream(self, prompt: list[int], *, data_parallel_rank: int | None = None) -> Streamed:
        body = {
            "model": DENSE.name,
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }
        headers = {} if data_parallel_rank is None else {"X-data-parallel-rank": str(data_parallel_rank)}
        lines = self.ask("/v1/completions", body, headers=headers).split("\n\n")
        assert lines[-2] == "data: [DONE]"
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        likeliest = [top.values() for choice in choices for top in choice["logprobs"]["top_logprobs"]]
        return Streamed([choice["text"] for choice in choices], min(max(two) - min(two) for two in likeliest))

    def metric(self, name: str, *, engine: int | None = None) -> float:
        """Over all of its labels, or over those of one engine."""
        rows = re.findall(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", self.ask("/metrics"), re.MULTILINE)
        assert rows, f"{name} is not there"
        return sum(float(value) for labels, value in rows if engine is None or f'engine="{engine}"' in labels)


@contextmanager
def serving(model: Path, log: Path, *arguments: str, connector: Mapping[str, object] = CONNECTOR) -> Iterator[Service]:
    """Serves the dense tiny model in this folder, with an engine's cache for two prompts or so."""
    small = ("--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(4 << 20))
    # It logs and has the processes that it has for a user who has said nothing of that, whatever engines began before.
    told = ("VLLM_LOGGING_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    with serving_with(environment, model, log, *small, *arguments, connector=connector) as one:
        yield one


def list_users_environment() -> dict[str, str]:
    """Returns the environment of a login shell, without what the tests tell their own engines."""
    return {name: value for name, value in os.environ.items() if name not in ENVIRONMENT and "VLLM" not in name} | USERS


@contextmanager
def serving_with(
    environment: Mapping[str, str],
    model: Path,
    log: Path,
    *arguments: str,
    connector: Mapping[str, object] | None,
    enter: Sequence[str] = (),
    patience: float = 1.0,
) -> Iterator[Service]:
    """Runs `vllm serve` with these arguments and environment variables alone, and ends it. `enter` begins its command
    line: where it runs. `patience`: how many times as long as usual everything may take."""
    port = free_port()
    command = [*enter, sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", DENSE.name, "--enforce-eager"]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, *arguments], stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            one = Service(port, log, ANSWER_S * patience)
            until = time.monotonic() + START_S * patience
            while True:
                with suppress(OSError):
                    one.ask("/health")
                    break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            yield one
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S * patience)  # killed, it would leave its engine behind
            process.kill()
