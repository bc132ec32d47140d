"""The models that the engines run: a random Qwen3 whose KV cache has 12 KiB per token, as a small real one has, and
Llama-3.1-8B without its weights."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.tiny_models import GDN, SLIDING, GroupShape, TinyModel, save_random_weights

LAYERS = 12
BLOCK_TOKENS = 128
PAGE_BYTES = BLOCK_TOKENS * 4 * 2 * 64 * 2
"""One layer's: tokens, heads, keys and values, head dimension, bytes of a bfloat16."""
TOKEN_BYTES = LAYERS * PAGE_BYTES // BLOCK_TOKENS
VOCABULARY = 4096


def build(folder: Path) -> None:
    """86 million parameters, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    save_random_weights(folder, config, Qwen3ForCausalLM)


DENSE_86M = TinyModel(
    name="qwen3-86m",
    build=build,
    groups=(GroupShape("FullAttentionSpec", tuple(range(LAYERS)), BLOCK_TOKENS, PAGE_BYTES, PAGE_BYTES),),
    hash_block_size=BLOCK_TOKENS,
    layout="LBHNC",
)


def build_llama_8b(folder: Path) -> None:
    """Its configuration, and a file in the place of the weights, which vLLM makes itself."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        torch_dtype="bfloat16",
    ).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")


LLAMA_8B_TOKEN_BYTES = 32 * 8 * 2 * 128 * 2
LLAMA_8B = TinyModel(
    name="llama-8b",
    build=build_llama_8b,
    groups=(GroupShape("FullAttentionSpec", tuple(range(32)), 16, 16 * 4096, 16 * 4096),),
    hash_block_size=16,
    layout="LBHNC",
    engine_args={
        "load_format": "dummy",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
)
MODELS = {model.name: model for model in (DENSE_86M, GDN, SLIDING, LLAMA_8B)}
