"""Engines that draft with a layer of the model's own (MTP), at the size of published models: a turn is restored to
where the engine's own hit ends."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.kv_cache_interface import MambaSpec

from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import DEEPSEEK_V3, QWEN3_NEXT_80B, Model
from benchmarks.ground.server import count_left, settle
from benchmarks.ground.trial import open_ours
from benchmarks.ground.work import make_fresh, repeat

pytestmark = pytest.mark.vllm

PROMPT, ANSWER = 3000, 20
ASYNC = EngineSettings(drafts=3, mtp=True)
ONE_BY_ONE = EngineSettings(drafts=3, mtp=True, is_async=False, runner=1)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("model", "settings"),
    [(DEEPSEEK_V3, ASYNC), (QWEN3_NEXT_80B, ASYNC), (QWEN3_NEXT_80B, ONE_BY_ONE)],
    ids=["latents", "states", "states, one step at a time"],
)
def test_a_turn_is_restored_to_where_the_engines_own_hit_ends(model: Model, settings: EngineSettings) -> None:
    first = make_fresh(4, tokens=PROMPT, new_tokens=ANSWER, per_s=0)
    with open_ours(model, settings) as engine:
        drafting = [group for group in engine.config.scheduler.kv_cache_groups if drafts(group, model)]
        assert len(drafting) == 1
        engine.serve(first)
        own = engine.serve(repeat(first[:2], from_s=0, new_tokens=2)).served
        settle(engine.scheduler.connector.scheduler_side.parts.cache)  # type: ignore[union-attr]
        assert engine.forget()
        restored = engine.serve(repeat(first[2:], from_s=0, new_tokens=2)).served
        assert not any(count_left(engine).values())
    expected = hit_tokens(engine.config.scheduler.kv_cache_groups)
    assert [(one.cached_tokens, one.external_tokens) for one in own] == [(expected, 0)] * 2
    assert [(one.cached_tokens, one.external_tokens) for one in restored] == [(expected, expected)] * 2


def drafts(group: Any, model: Model) -> bool:
    """The layer behind the model's own."""
    return f"model.layers.{model.config['num_hidden_layers']}.attn" in group.layer_names


def hit_tokens(groups: Any) -> int:
    """One block before the last whole one that the first turn left, of answers too where there are no states."""
    (block_size,) = {group.kv_cache_spec.block_size for group in groups}
    has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    left = PROMPT if has_states else PROMPT + ANSWER
    return int(left // block_size * block_size - block_size)
