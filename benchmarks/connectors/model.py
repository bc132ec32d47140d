"""The model that the engines run: a random Qwen3 whose KV cache has 12 KiB per token, as a small real one has."""

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
MODELS = {model.name: model for model in (DENSE_86M, GDN, SLIDING)}
