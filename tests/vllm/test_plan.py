"""`kvoffload plan` says from a config alone what the real engine then keeps; with --exact the engine says it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvoffload.kvspec import ReuseRule
from kvoffload.plan.exact import ask_vllm
from kvoffload.plan.model_shape import Keeps, ModelShape, ShapeSettings, read_config, read_shape
from kvoffload.plan.sizing import size_model
from tests.kit.plan.configs import ENGINES_ALONE, PUBLISHED
from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool
from tests.vllm.equality import LOCAL_CASES, MLA_CASE, Case, each

pytestmark = pytest.mark.vllm

KEEPS = {
    ReuseRule.PREFIX: Keeps.TOKENS,
    ReuseRule.WINDOW: Keeps.WINDOW,
    ReuseRule.EXACT_BOUNDARY: Keeps.STATE,
}


@each(*LOCAL_CASES, MLA_CASE)
def test_figures_are_those_of_the_engine(engines: EnginePool, case: Case) -> None:
    engine, model = case.acquire(engines), case.model
    side: Any = probe.scheduler_connector(engine).scheduler_side
    kept: dict[Keeps, float] = {}
    for facts in side.parts.groups.facts:
        keeps = KEEPS[facts.rule.reuse]
        size = facts.record_bytes if keeps is Keeps.STATE else facts.record_bytes / facts.rule.block_size
        kept[keeps] = kept.get(keeps, 0) + size
    kv_dtype = str(case.arguments.get("kv_cache_dtype", "auto"))
    settings = ShapeSettings(kv_dtype=kv_dtype, state_dtype=str(model.engine_args.get("mamba_ssm_cache_dtype", "auto")))
    planned: dict[Keeps, float] = {}
    for group in size_model(read_shape(read_config(engines.model_folder(model)), settings)).groups:
        planned[group.keeps] = planned.get(group.keeps, 0) + group.token_bytes + group.state_bytes
    assert planned == kept


ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
"""Of those for which transformers has no name, or another one."""
IN_CI = ("Qwen3-Next-80B-A3B",)


def ask_exactly(config: dict[str, Any]) -> ModelShape:
    """Asks vLLM; of a model that sees, for its text part: vLLM's classes of the whole import what is not installed for
    tests."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = {"torch_dtype": config["torch_dtype"], **config.get("text_config", config)}
    kind = text["model_type"]
    architecture = ARCHITECTURES.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return ask_vllm({**text, "architectures": [architecture]}, ShapeSettings(state_dtype="float32"))


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.campaign) for name in PUBLISHED]
)
def test_what_a_published_config_says_is_what_the_engine_says(name: str) -> None:
    config = PUBLISHED[name].config
    planned = read_shape(config, ShapeSettings(state_dtype="float32")).layers

    def count(layers: Any) -> Counter[tuple[Keeps, int, int, int]]:
        return Counter((one.keeps, one.token_bytes, one.tokens, one.state_bytes) for one in layers)

    assert count(ask_exactly(config).layers) == count(planned)


def test_a_model_that_only_the_engine_knows() -> None:
    layers = ask_exactly(ENGINES_ALONE["Falcon-H1-7B"]).layers
    assert Counter(one.keeps for one in layers) == {Keeps.TOKENS: 44, Keeps.STATE: 44}
    assert {one.token_bytes for one in layers if one.keeps is Keeps.TOKENS} == {2 * 2 * 128 * 2}
