"""Steps take what a roofline of the GPU says."""

from __future__ import annotations

import pytest

from benchmarks.ground.accelerator import Share, StepCost
from benchmarks.ground.models import DEEPSEEK_V3, GEMMA_3_27B, LLAMA_70B, MODELS, Model


def test_nothing_takes_no_time() -> None:
    assert StepCost(LLAMA_70B).seconds([]) == 0


def test_prompts_take_their_flops() -> None:
    computing_s = 2 * LLAMA_70B.parameters * 8192 / (8 * LLAMA_70B.gpu.flops)
    assert computing_s < StepCost(LLAMA_70B).seconds([Share(8192, 0)]) < 1.5 * computing_s


def test_decoding_reads_weights_and_what_is_cached() -> None:
    cost = StepCost(LLAMA_70B)
    short, long = (cost.seconds([Share(1, context)] * 64) for context in (1000, 9000))
    assert long - short == pytest.approx(64 * 8000 * 327_680 / (8 * LLAMA_70B.gpu.memory_rate))
    assert short > LLAMA_70B.weight_bytes / (8 * LLAMA_70B.gpu.memory_rate)


def test_windows_end_what_is_read() -> None:
    cost = StepCost(GEMMA_3_27B)
    near, far, farther = (cost.seconds([Share(1, context)]) for context in (1024, 2048, 3072))
    assert far - near < 1.01 * (farther - far)


def test_few_tokens_read_few_experts() -> None:
    cost = StepCost(DEEPSEEK_V3)
    assert cost.seconds([Share(1, 0)]) < cost.seconds([Share(1, 0)] * 64) / 4


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_each_model_leaves_room_for_its_cache(model: Model) -> None:
    assert model.cache_bytes > 20e9
    assert StepCost(model).prefill_rate() > 10_000
