"""A model whose windows no cache holds: vLLM's scheduler computes the last window of each hit again."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import DEEPSEEK_V3
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_ours
from benchmarks.ground.work import Ask, make_tokens

pytestmark = pytest.mark.vllm

WINDOW = 128
MODEL = replace(
    DEEPSEEK_V3,
    ranks=1,
    weight_bytes=0,
    config={
        **DEEPSEEK_V3.config,
        "num_hidden_layers": 6,
        "layer_kinds": ["latent", "replayed"] * 2 + ["latent", "ring"],
        "replayed_tokens": WINDOW,
    },
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(is_async=False)], ids=["async", "sync"])
def test_hits_longer_than_the_window_are_loaded_and_every_answer_comes(settings: EngineSettings) -> None:
    prompts = {"long": make_tokens(1, 3000), "just longer": make_tokens(2, 200), "as long": make_tokens(3, 129)}
    with open_ours(MODEL, settings, settings={"load_policy": "always"}) as engine:
        groups = engine.config.scheduler.kv_cache_groups
        assert {group.kv_cache_spec.prefix_cacheable for group in groups} == {True, False}
        assert engine.scheduler.prefix_replay_tokens == WINDOW
        engine.serve([Ask(name, prompt, [1, 2]) for name, prompt in prompts.items()])
        assert engine.forget()
        again = [Ask(f"{name} again", prompt, [3, 4]) for name, prompt in prompts.items()]
        served = {one.ask.name: one for one in engine.serve(again).served}
        assert not any(count_left(engine).values())
    hits = {name: one.external_tokens for name, one in served.items()}
    assert hits == {"long again": 2944, "just longer again": 192, "as long again": 0}
    for one in served.values():
        assert list(one.request.output_token_ids) == one.ask.answer
