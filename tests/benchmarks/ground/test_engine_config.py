"""Published models have the groups that vLLM makes of them, and `kvoffload plan` says the same bytes of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from benchmarks.ground.engine_config import EngineConfig, EngineSettings, make_config
from benchmarks.ground.models import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA_3_27B,
    GPT_OSS_120B,
    LLAMA_70B,
    MODELS,
    QWEN3_NEXT_80B,
    SHAPES,
    Model,
)
from kvoffload.connector.engine.replicas import find_replicas
from kvoffload.plan.model_shape import Keeps, ShapeSettings, read_shape
from kvoffload.plan.sizing import size_model

pytestmark = pytest.mark.vllm

KEEPS = ((MambaSpec, Keeps.STATE), (SlidingWindowSpec, Keeps.WINDOW), (FullAttentionSpec, Keeps.TOKENS))


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigMaker:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return ConfigMaker(tmp_path)


class ConfigMaker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, model: Model, **settings: object) -> EngineConfig:
        return make_config(model, EngineSettings(**settings), self._folder)  # type: ignore[arg-type]


def keeps(group: KVCacheGroupSpec) -> Keeps:
    first = next(iter(iter_layer_specs(group.kv_cache_spec)))
    return next(kept for kind, kept in KEEPS if isinstance(first, kind))


PLANNED = [model for model in MODELS if model is not DEEPSEEK_V32]
"""The models whose layers follow from their config alone. An index does not."""


@pytest.mark.parametrize("model", PLANNED, ids=[model.name for model in PLANNED])
def test_plan_says_what_vllm_makes_of_a_model(configured: ConfigMaker, model: Model) -> None:
    config = configured.make(model)
    shape = read_shape(model.config, ShapeSettings(kv_dtype=model.kv_dtype, ranks=model.ranks))
    planned: dict[Keeps, float] = {}
    for size in size_model(shape).groups:
        planned[size.keeps] = planned.get(size.keeps, 0) + size.token_bytes + size.state_bytes
    made: dict[Keeps, float] = {}
    for group in config.worker.kv_cache_groups:
        spec, kept = group.kv_cache_spec, keeps(group)
        replicas = find_replicas(config.vllm, config.worker).get(group.layer_names[0], 1)
        block = len(group.layer_names) * spec.real_page_size_bytes * model.ranks // replicas
        made[kept] = made.get(kept, 0) + (block if kept is Keeps.STATE else block / spec.block_size)
    assert made == planned


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (LLAMA_70B, [(Keeps.TOKENS, 80, 16)]),
        (DEEPSEEK_V3, [(Keeps.TOKENS, 61, 64)]),
        (DEEPSEEK_V32, [(Keeps.TOKENS, 122, 64)]),
        (GPT_OSS_120B, [(Keeps.WINDOW, 18, 16), (Keeps.TOKENS, 18, 16)]),
        (GEMMA_3_27B, [*[(Keeps.WINDOW, 9, 16)] * 4, *[(Keeps.WINDOW, 8, 16)] * 2, (Keeps.TOKENS, 10, 16)]),
        (QWEN3_NEXT_80B, [*[(Keeps.STATE, 12, 272)] * 3, (Keeps.TOKENS, 12, 272)]),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_layers_are_grouped_as_in_production(
    configured: ConfigMaker, model: Model, groups: list[tuple[Keeps, int, int]]
) -> None:
    made = configured.make(model).worker.kv_cache_groups
    assert [(keeps(group), len(group.layer_names), group.kv_cache_spec.block_size) for group in made] == groups


def test_latents_are_the_same_on_every_rank(configured: ConfigMaker) -> None:
    config = configured.make(DEEPSEEK_V3)
    assert isinstance(config.worker.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec)
    assert config.worker.kv_tp_replicas == DEEPSEEK_V3.ranks


@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        *[(shape, 1) for shape in SHAPES[LLAMA_70B.name] if shape.ranks != 16],
        (replace(LLAMA_70B, ranks=16), 2),
        (DEEPSEEK_V3, 8),
        (replace(DEEPSEEK_V3, context_ranks=8), 1),
        (replace(QWEN3_NEXT_80B, ranks=8, stages=2), 2),
        (replace(GPT_OSS_120B, ranks=16), 2),
    ],
    ids=lambda value: f"{value.name}, {value.ranks} ranks" if isinstance(value, Model) else "",
)
def test_layers_tell_which_ranks_hold_the_same_as_real_ones_do(
    configured: ConfigMaker, model: Model, replicas: int
) -> None:
    """Layers with states divide them in ways of their own."""
    config = configured.make(model)
    told: dict[str, int] = {}
    for stage in config.stages:
        told |= find_replicas(config.vllm, stage)
    groups = [group for stage in config.stages for group in stage.kv_cache_groups]
    names = {name for group in groups if keeps(group) is not Keeps.STATE for name in group.layer_names}
    assert told == (dict.fromkeys(names, replicas) if replicas > 1 else {})


def test_an_engine_is_what_it_is_on_a_gpu(configured: ConfigMaker) -> None:
    config = configured.make(LLAMA_70B, drafts=3)
    assert config.vllm.scheduler_config.async_scheduling
    assert config.vllm.max_concurrent_batches == 2
    assert config.vllm.num_speculative_tokens == 3
    assert config.worker.num_blocks == LLAMA_70B.cache_bytes // (80 * 8192)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_engine_computes_prompts_in_steps_and_keeps_prefixes(configured: ConfigMaker, model: Model) -> None:
    """vLLM built for CPUs takes both from models with MLA."""
    vllm = configured.make(model, step_tokens=4096).vllm
    assert vllm.cache_config.enable_prefix_caching
    assert vllm.scheduler_config.enable_chunked_prefill
    assert vllm.scheduler_config.max_num_batched_tokens == 4096
