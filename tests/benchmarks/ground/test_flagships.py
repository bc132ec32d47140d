"""This year's models, as they are deployed: forgotten prompts come back as far as the engine's own hits reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.flagships import FLAGSHIPS
from benchmarks.ground.models import Model
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_ours
from benchmarks.ground.work import make_fresh

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("model", FLAGSHIPS, ids=lambda model: model.name)
def test_prompts_that_the_engine_forgot_come_back_as_far_as_its_own_hits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asks = make_fresh(2, tokens=9000, new_tokens=8, per_s=0)
    with open_ours(model, EngineSettings(), settings={"load_policy": "always"}) as engine:
        engine.serve(asks)
        own = engine.serve([replace(ask, name=f"{ask.name} again") for ask in asks]).served
        assert engine.forget()
        loaded = engine.serve([replace(ask, name=f"{ask.name} loaded") for ask in asks]).served
        assert not any(count_left(engine).values())
    assert [one.external_tokens for one in loaded] == [one.cached_tokens for one in own]
    assert all(one.external_tokens == 0 and one.cached_tokens > 7000 for one in own)
