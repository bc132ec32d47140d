"""`vllm serve` as users run it: streams of text, `/metrics`, and our plugin with no setting of its own but its size."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

START_S = 120.0
CLIENTS = 8
CONNECTOR = {
    "kv_connector": "KVOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"memory": "256MiB"},
}
PROMPT_TOKENS = 700
RESTORABLE = 640


@dataclass(frozen=True)
class Service:
    """A running `vllm serve`, and what it has written."""

    port: int
    log: Path

    def ask(self, path: str, body: dict[str, object] | None = None) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                "GET" if body is None else "POST",
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()

    def stream(self, prompt: list[int]) -> list[str]:
        """The pieces of text that came, one after the other."""
        body = {
            "model": DENSE.name,
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        lines = self.ask("/v1/completions", body).split("\n\n")
        assert lines[-2] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]

    def metric(self, name: str) -> float:
        """Over all of its labels."""
        rows = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.ask("/metrics"), re.MULTILINE)
        assert rows, f"{name} is not there"
        return sum(map(float, rows))


@pytest.fixture(scope="module")
def service(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("http") / "log"
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port = end.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(engines.model_folder(DENSE)), "--served-model-name", DENSE.name, "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(4 << 20)]
    command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            one = Service(port, log)
            until = time.monotonic() + START_S
            while True:
                with suppress(OSError):
                    one.ask("/health")
                    break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield one
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def test_streams_are_restored_and_equal(service: Service) -> None:
    """The engine itself keeps two of these prompts; most come back from the cache server."""
    prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(CLIENTS)]
    first = [service.stream(prompt) for prompt in prompts]
    with ThreadPoolExecutor(CLIENTS) as clients:
        again = list(clients.map(service.stream, prompts))
    assert all(len(pieces) > 1 for pieces in first), "nothing was streamed"
    # A busy engine sends what it has of two steps at once.
    assert ["".join(pieces) for pieces in again] == ["".join(pieces) for pieces in first]
    assert service.metric("kvoffload_hits_total") >= CLIENTS // 2 * RESTORABLE
    assert service.metric("vllm:external_prefix_cache_hits_total") >= CLIENTS // 2 * RESTORABLE
    assert service.metric("kvoffload_saved_bytes_total") > 0
    assert service.metric("kvoffload_load_seconds_count") >= CLIENTS // 2
    assert service.metric("kvoffload_failed_loads_total") == 0


def test_a_default_run_warns_of_nothing(service: Service) -> None:
    service.stream(make_prompt(1, PROMPT_TOKENS))
    complaints = [line for line in service.log.read_text().splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
    ours = [line for line in complaints if re.search(r"kvoffload|KVOffload|[Cc]onnector|stats", line)]
    # vLLM says of every connector that its interface is experimental.
    assert not [line for line in ours if "KVConnectorBase_V1" not in line]
