"""The sizes that `kvoffload plan --engine sglang` prints are those of the records that SGLang's linker registers."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.plan.model_shape import Keeps, ShapeSettings
from kvoffload.plan.sglang_pages import ONE_POOL, WINDOW_POOLS, PageSettings, read_pages
from kvoffload.plan.sizing import GroupSize, size_model
from kvoffload.sglang.pools import PoolPages, describe_pool
from tests.kit.plan.configs import DEEPSEEK_V3, GPT_OSS, LLAMA_8B, NEMOTRON_H, QWEN_NEXT
from tests.kit.sglang.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "torch_dtype": "bfloat16"}
LLAMA = {**SHAPE, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
LATENT = {
    **SHAPE,
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
}
WINDOWS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SIZES = pytest.mark.parametrize("page_tokens", [1, 16, 64])


def plan(config: dict[str, Any], *, page_tokens: int = 1, ranks: int = 1, **shape: Any) -> list[tuple[GroupSize, int]]:
    """Returns each group, with the size of its records."""
    settings = PageSettings(shape=ShapeSettings(ranks=ranks, **shape), page_tokens=page_tokens)
    return [(group, settings.record_bytes(group)) for group in size_model(read_pages(config, settings)).groups]


def register(pool: Any, page_tokens: int, window: int = 0) -> PoolPages:
    return describe_pool(pool, page_size=page_tokens, window=window)


@SIZES
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_pages_of_attention_are_those_of_each_rank(page_tokens: int, ranks: int) -> None:
    heads = max(LLAMA["num_key_value_heads"] // ranks, 1)
    pool = MHATokenToKVPool(heads=heads, head_dim=16, v_head_dim=16, size=4 * page_tokens, page_size=page_tokens)
    ((group, size),) = plan(LLAMA, page_tokens=page_tokens, ranks=ranks)
    (registered,) = register(pool, page_tokens).geometry.groups
    assert (size, page_tokens) == (registered.record_bytes, registered.block_size)
    assert group.token_bytes == ranks * registered.record_bytes // page_tokens


@SIZES
@pytest.mark.parametrize("ranks", [1, 4])
def test_each_rank_keeps_its_own_latents(page_tokens: int, ranks: int) -> None:
    pool = MLATokenToKVPool(dim=24, size=4 * page_tokens, page_size=page_tokens)
    ((group, size),) = plan(LATENT, page_tokens=page_tokens, ranks=ranks)
    (registered,) = register(pool, page_tokens).geometry.groups
    assert size == registered.record_bytes
    assert group.token_bytes == ranks * registered.record_bytes // page_tokens


@SIZES
def test_a_window_is_as_many_whole_pages_as_the_linker_asks_for(page_tokens: int) -> None:
    def make_part() -> MHATokenToKVPool:
        return MHATokenToKVPool(heads=4, head_dim=16, v_head_dim=16, size=4 * page_tokens, page_size=page_tokens)

    pool = SWAKVPool(page_size=page_tokens, size=4 * page_tokens, size_swa=4 * page_tokens)
    pool.full_kv_pool, pool.swa_kv_pool = make_part(), make_part()
    # SGLang's class of the model says one less than its config.
    pages = register(pool, page_tokens, window=WINDOWS["sliding_window"] - 1)
    full, window = pages.pool_settings
    planned = {group.keeps: (group.window_tokens, size) for group, size in plan(WINDOWS, page_tokens=page_tokens)}
    assert planned == {
        Keeps.TOKENS: (0, full.record_bytes),
        Keeps.WINDOW: (window.trailing_pages * page_tokens, window.record_bytes),
    }


def test_windows_are_kept_whole_in_models_with_one_pool() -> None:
    config = {**WINDOWS, "model_type": "gemma2"}
    ((group, _),) = plan(config, page_tokens=64)
    assert (group.keeps, group.layers) == (Keeps.TOKENS, 4)
    with pytest.raises(ConfigError, match="not known how SGLang keeps the windows of 'qwen2_moe'"):
        plan({**WINDOWS, "model_type": "qwen2_moe"})
    assert not WINDOW_POOLS.keys() & ONE_POOL.keys()


def test_states_have_the_dtype_that_sglang_gives_them() -> None:
    by_keeps = {group.keeps: (group, size) for group, size in plan(QWEN_NEXT)}
    group, size = by_keeps[Keeps.STATE]
    assert size == group.state_bytes
    same = {one.keeps: one for one, _ in plan(QWEN_NEXT, state_dtype="float32")}
    assert same[Keeps.STATE] == group
    narrow = {one.keeps: one for one, _ in plan({**QWEN_NEXT, "mamba_ssm_dtype": "bfloat16"})}
    assert narrow[Keeps.STATE].state_bytes < group.state_bytes
    assert {one.keeps for one, _ in plan(NEMOTRON_H)} == {Keeps.TOKENS, Keeps.STATE}


@pytest.mark.parametrize(
    ("config", "settings", "why"),
    [
        (QWEN_NEXT, {"page_tokens": 16}, "states with pages of 16 tokens"),
        (LLAMA_8B, {"kv_dtype": "fp8"}, "KV cache of fp8"),
        ({**WINDOWS, **LATENT, "num_hidden_layers": 4, "model_type": "made_up"}, {}, "latents together with windows"),
        ({**WINDOWS, "layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8}, {}, "not known how SGLang"),
    ],
    ids=["states", "fp8", "mixture", "chunks"],
)
def test_models_that_the_linker_refuses_are_refused(config: dict[str, Any], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(config, **settings)


def test_published_models() -> None:
    assert [(group.window_tokens, size) for group, size in plan(GPT_OSS, page_tokens=64)] == [
        (128, 64 * 18 * 8 * 64 * 2 * 2),
        (0, 64 * 18 * 8 * 64 * 2 * 2),
    ]
    ((_, size),) = plan(DEEPSEEK_V3, page_tokens=64, ranks=8)
    assert size == 64 * 61 * (512 + 64) * 2
