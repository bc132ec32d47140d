"""`vllm serve` as users run it: streams of text, `/metrics`, and our plugin with no setting of its own but its size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.http_service import CONNECTOR, Service, Streamed, serving
from tests.vllm.served_prompts import PROMPT_TOKENS, RESTORABLE
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

CLIENTS = 8
MAX_SEEDS = 100
WAIT_S = 60.0


@pytest.fixture(scope="module")
def service(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(engines.model_folder(DENSE), tmp_path_factory.mktemp("http") / "log") as one:
        yield one


def find_clear_prompts(service: Service) -> list[tuple[list[int], Streamed]]:
    """Asks with one prompt after the other, and gives those whose answers no rounding decides, each with its answer."""
    found: list[tuple[list[int], Streamed]] = []
    for seed in range(MAX_SEEDS):
        prompt = make_prompt(seed, PROMPT_TOKENS)
        answer = service.stream(prompt)
        if answer.is_clear:
            found.append((prompt, answer))
        if len(found) == CLIENTS:
            return found
    raise AssertionError(f"{len(found)} of {MAX_SEEDS} prompts are clear, {CLIENTS} are needed")


def test_streams_are_restored_and_equal(service: Service) -> None:
    """The engine itself keeps two of these prompts; most come back from the cache server."""
    prompts, first = zip(*find_clear_prompts(service), strict=True)
    with ThreadPoolExecutor(CLIENTS) as clients:
        again = list(clients.map(service.stream, prompts))
    # A busy server sends what it has of several steps at once.
    assert any(len(one.pieces) > 1 for one in first), "nothing was streamed"
    assert [one.text for one in again] == [one.text for one in first]
    assert service.metric("kvoffload_hits_total") >= CLIENTS // 2 * RESTORABLE
    assert service.metric("vllm:external_prefix_cache_hits_total") >= CLIENTS // 2 * RESTORABLE
    assert service.metric("kvoffload_saved_bytes_total") > 0
    assert service.metric("kvoffload_load_seconds_count") >= CLIENTS // 2
    assert service.metric("kvoffload_failed_loads_total") == 0


def test_the_default_log_has_our_lines_as_vllms_own(service: Service) -> None:
    """With its prefix of the process, its level and its form, and each once."""
    lines = service.log.read_text().splitlines()
    [told] = [line for line in lines if "kvoffload keeps KV cache of" in line]
    assert re.match(r"\(EngineCore pid=\d+\) INFO [-0-9]+ [:0-9]+ \[start_up\.py:\d+\] kvoffload keeps", told)
    [log] = re.findall(r" of a private server \(log: (\S+)\): ", told)
    assert "kvoffload serves 256MiB" in Path(log).read_text()
    [sampled] = [line for line in lines if ": sampled " in line]
    assert re.match(r"\(Worker pid=\d+\) INFO [-0-9]+ [:0-9]+ \[weight_watch\.py:\d+\] weights ", sampled)


def test_a_default_run_warns_of_nothing(service: Service) -> None:
    service.stream(make_prompt(1, PROMPT_TOKENS))
    complaints = [line for line in service.log.read_text().splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
    ours = [line for line in complaints if re.search(r"kvoffload|KVOffload|[Cc]onnector|stats", line)]
    # vLLM says of every connector that its interface is experimental.
    assert not [line for line in ours if "KVConnectorBase_V1" not in line]


def test_a_private_servers_trouble_is_in_the_engines_log_once_and_a_metric(engines: EnginePool, tmp_path: Path) -> None:
    """Its disk is not there, which it finds out before the engine comes."""
    settings = {**CONNECTOR["kv_connector_extra_config"], "disk": f"{tmp_path}/none", "disk_size": "1GiB"}  # type: ignore[dict-item]
    transfer = json.dumps({**CONNECTOR, "kv_connector_extra_config": settings})
    with serving(engines.model_folder(DENSE), tmp_path / "log", "--kv-transfer-config", transfer) as service:
        end_s = time.monotonic() + WAIT_S
        while service.metric("kvoffload_server_warnings_total") == 0:
            assert time.monotonic() < end_s
            service.stream(make_prompt(1, PROMPT_TOKENS))
        assert service.metric("kvoffload_server_warnings_total") == 1
        [told] = [line for line in service.log.read_text().splitlines() if "disk tier" in line]
        assert re.match(
            r"\(EngineCore pid=\d+\) WARNING .*\] the cache server warns: disk tier .*/none is absent", told
        )
