"""`vllm serve` as users run it: streams of text, `/metrics`, and our plugin with no setting of its own but its size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.http_service import Service, Streamed, serving
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

CLIENTS = 8
PROMPT_TOKENS = 700
RESTORABLE = 640
# Which requests share a step decides how the engine's own kernels round. Its numbers have steps of 1/32 and 1/16 here.
CLEAR_MARGIN = 0.2
MAX_SEEDS = 100


@pytest.fixture(scope="module")
def service(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(engines.model_folder(DENSE), tmp_path_factory.mktemp("http") / "log") as one:
        yield one


def clear_prompts(service: Service) -> tuple[list[list[int]], list[Streamed]]:
    """Prompts whose every answered token is clearly the likeliest, and what they were answered."""
    asked = ((prompt, service.stream(prompt)) for prompt in (make_prompt(s, PROMPT_TOKENS) for s in range(MAX_SEEDS)))
    clear = list(islice(((prompt, one) for prompt, one in asked if one.margin >= CLEAR_MARGIN), CLIENTS))
    assert len(clear) == CLIENTS
    return [prompt for prompt, _ in clear], [one for _, one in clear]


def test_streams_are_restored_and_equal(service: Service) -> None:
    """The engine itself keeps two of these prompts; most come back from the cache server."""
    prompts, first = clear_prompts(service)
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


def test_a_default_run_warns_of_nothing(service: Service) -> None:
    service.stream(make_prompt(1, PROMPT_TOKENS))
    complaints = [line for line in service.log.read_text().splitlines() if re.search(r"WARN|ERROR|Traceback", line)]
    ours = [line for line in complaints if re.search(r"kvoffload|KVOffload|[Cc]onnector|stats", line)]
    # vLLM says of every connector that its interface is experimental.
    assert not [line for line in ours if "KVConnectorBase_V1" not in line]
