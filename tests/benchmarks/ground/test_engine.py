"""A virtual engine is vLLM's scheduler: every token comes, in time, whatever the order of steps."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.accelerator import Share, StepCost
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import DEEPSEEK_V32, GPT_OSS_120B, LLAMA_8B, QWEN3_NEXT_80B, Model
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_bare, open_ideal
from benchmarks.ground.work import make_agents, make_fresh, repeat

pytestmark = pytest.mark.vllm

SHAPES = (
    EngineSettings(),
    EngineSettings(is_async=False),
    EngineSettings(drafts=3),
    EngineSettings(is_async=False, drafts=3),
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("settings", SHAPES, ids=["async", "sync", "async, drafts", "sync, drafts"])
def test_every_request_gets_its_answer(settings: EngineSettings) -> None:
    asks = make_fresh(6, tokens=900, new_tokens=20, per_s=50.0)
    with open_bare(LLAMA_8B, settings) as engine:
        run = engine.serve(asks)
        assert not any(count_left(engine).values())
    assert {one.ask.name for one in run.served} == {ask.name for ask in asks}
    for one in run.served:
        assert list(one.request.output_token_ids) == one.ask.answer
        assert one.arrived_s < one.first_s < one.ended_s


def test_a_first_token_takes_what_its_prompt_takes() -> None:
    (ask,) = make_fresh(1, tokens=8000, new_tokens=2, per_s=0)
    with open_bare(LLAMA_8B, EngineSettings()) as engine:
        (one,) = engine.serve([ask]).served
    assert one.ttft_s == pytest.approx(StepCost(LLAMA_8B).seconds([Share(8000, 0)]))


def test_a_turn_comes_after_the_one_before() -> None:
    asks = make_agents(2, turns=3, first_tokens=3000, tool_tokens=64, new_tokens=8, think_s=1.0)
    with open_bare(LLAMA_8B, EngineSettings()) as engine:
        served = {one.ask: one for one in engine.serve(asks).served}
    for ask, one in served.items():
        if ask.after is not None:
            assert one.arrived_s > served[ask.after].ended_s
            assert one.cached_tokens >= len(ask.after.prompt) // 16 * 16


@pytest.mark.parametrize("model", [LLAMA_8B, GPT_OSS_120B, QWEN3_NEXT_80B, DEEPSEEK_V32], ids=lambda model: model.name)
def test_an_ideal_connector_misses_nothing(model: Model) -> None:
    asks = make_fresh(4, tokens=3000, new_tokens=20, per_s=0)
    with open_ideal(model, EngineSettings()) as engine:
        engine.serve(asks)
        assert engine.forget()
        run = engine.serve(repeat(asks, from_s=0, new_tokens=2))
        assert not any(count_left(engine).values())
    for one in run.served:
        # A model with states has one at the prompt's end.
        assert one.external_tokens >= (3000 // 272 * 272 if model is QWEN3_NEXT_80B else 3008)
        assert one.ttft_s < 0.1


@pytest.mark.parametrize("model", [GPT_OSS_120B, QWEN3_NEXT_80B], ids=lambda model: model.name)
def test_a_lean_ideal_connector_finds_the_ends_of_prompts_and_requests_in_fewer_bytes(model: Model) -> None:
    asks = make_fresh(4, tokens=3000, new_tokens=300, per_s=0)
    found = {}
    for is_lean in (False, True):
        with open_ideal(model, EngineSettings(step_tokens=1024), is_lean=is_lean) as engine:
            engine.serve(asks)
            assert engine.forget()
            connector: Any = engine.scheduler.connector
            used_bytes = connector.pool.used_bytes
            run = engine.serve(repeat(asks, from_s=0, new_tokens=2))
            found[is_lean] = sum(one.external_tokens for one in run.served), used_bytes
    assert found[True][0] == found[False][0] > 0
    # vLLM itself hands off states only where prompts end.
    assert found[True][1] < found[False][1] * (1 if model is QWEN3_NEXT_80B else 0.8)
