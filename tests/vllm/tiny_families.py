"""Tiny random models of further families, for tests that run an engine as its users do and look at no group of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.vllm.tiny_deepseek_v4 import build_deepseek_v4
from tests.vllm.tiny_models import build_dense, build_gdn, build_mla, save_model, shared_shape


def build_windows(folder: Path) -> None:
    """GPT-OSS: a sliding window of 128 tokens in every second layer, full attention in the others, with sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    save_model(folder, config, GptOssForCausalLM)


def build_chunked(folder: Path) -> None:
    """Llama 4: attention within chunks of 512 tokens in three of four layers, full attention in the fourth."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=512,
        attention_chunk_size=512,
        no_rope_layers=[1, 1, 1, 0],
        interleave_moe_layer_step=1,
    )
    save_model(folder, config, Llama4ForCausalLM)


def build_short_convolutions(folder: Path) -> None:
    """LFM2: short convolutions, whose states vLLM keeps as Mamba's, and one layer of full attention. vLLM's CPU build
    has no kernel for the states of Jamba, and Mamba-2 hybrids fail there with prefix caching."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **shared_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        full_attn_idxs=[2],
        block_auto_adjust_ff_dim=False,
        block_dim=256,
        block_ff_dim=512,
        conv_dim=256,
        conv_L_cache=3,
    )
    save_model(folder, config, Lfm2ForCausalLM)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "full": build_dense,
    "windows": build_windows,
    "gdn": build_gdn,
    "mamba": build_short_convolutions,
    "mla": build_mla,
    "deepseek-v4": build_deepseek_v4,
    "chunked": build_chunked,
}
