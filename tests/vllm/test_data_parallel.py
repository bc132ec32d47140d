"""The engines of one data-parallel deployment share one private server, so each finds what the others computed.

The test's own timeout bounds what it waits for. Replicas of a model with experts divide them, for which vLLM on a CPU
lacks a collective operation (`all_gatherv`): they start, join one server, and fail with the first step.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.http_service import serving
from tests.vllm.served_prompts import PROMPT_TOKENS, RESTORABLE
from tests.vllm.tiny_models import DENSE

CLEAR_SEED = 46
"""Its answer is far from any rounding."""

pytestmark = [pytest.mark.vllm, pytest.mark.campaign]


def test_one_engine_hits_what_the_other_has_computed(engines: EnginePool, tmp_path: Path) -> None:
    prompt = make_prompt(CLEAR_SEED, PROMPT_TOKENS)
    with serving(engines.model_folder(DENSE), tmp_path / "log", "--data-parallel-size", "2") as service:
        first = service.stream(prompt, data_parallel_rank=0)
        assert first.is_clear, "another seed is needed"
        assert [service.metric("kvoffload_queries_total", engine=engine) for engine in (0, 1)] == [PROMPT_TOKENS, 0]
        while not service.metric("kvoffload_saved_bytes_total", engine=0):
            time.sleep(0.05)
        second = service.stream(prompt, data_parallel_rank=1)
        assert second.text == first.text
        assert service.metric("vllm:external_prefix_cache_hits_total", engine=1) == RESTORABLE
        assert service.metric("vllm:external_prefix_cache_hits_total", engine=0) == 0
