"""The models of 2026, and some older ones, whose layers do not follow from a few fields of their configs, with the
specs that vLLM's own classes make of them (`tests/vllm/test_gallery.py` compares the groups). None of them was run
here.

Parameters were counted on the modules that vLLM makes, without DeepSeek-V4.1's tables of token sequences; a token uses
those of its experts, and of all else but Qwen4-exp's table of such sequences. The bytes of weights are those of these
modules for DeepSeek-V4.1 and Qwen4-exp. For the others they are an assumption: 4 bits a parameter for Kimi-K3, and 8
for GLM-5-next and MiniMax-M3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
)

from benchmarks.ground.models import DEEPSEEK_V3, GB, H200, LLAMA_8B, LLAMA_70B, QWEN3_NEXT_80B, Gpu, Model

Layers = Iterator[tuple[str, KVCacheSpec]]
"""Names of caches, as vLLM has them, and their specs for one rank."""
BF16, FP32, BYTES = torch.bfloat16, torch.float32, torch.uint8
B300 = Gpu(name="B300", memory_bytes=288 * GB, flops=1000e12, memory_rate=6e12)
"""SXM: 2,500 TFLOP/s and 8 TB/s by the data sheet."""


def make_deepseek_v41(model: Model) -> Layers:
    """Windows that are computed again after a hit, and latents and keys of an index in four layers, which the others
    read: three of them have one entry for two tokens, and a ring of keys that are not compressed yet."""
    packed: dict[str, Any] = {"num_kv_heads": 1, "dtype": BYTES, "alignment": 576}
    latent: dict[str, Any] = {
        **packed,
        "head_size": 512,
        "state_content_bytes": 584,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    }
    for layer in range(40):
        name = f"model.layers.{layer}.attn"
        window = {"block_size": 32, "sliding_window": 128, "bounded_replay": True, "max_tp_shards": 1}
        if layer in (2, 8, 14, 20):
            ratio = 1 if layer == 20 else 2
            block = {"block_size": 64, "block_stride_alignment": MultipleOf(64), "tokens_per_state": ratio}
            yield name, MLAAttentionSpec(**block, **latent)
            yield f"{name}.indexer.k_cache", MLAAttentionSpec(**block, **packed, head_size=132)
        yield f"{name}.swa_cache", SlidingWindowMLASpec(**window, **latent)
        if layer in (2, 8, 14):
            ring = {"block_size": 8, "num_kv_heads": 1, "head_size": 1024, "dtype": FP32, "head_size_v": 0}
            yield f"{name}.compressor.state_cache", CircularBufferSpec(**ring)


def make_glm_5_next(model: Model) -> Layers:
    """States, and in every fourth layer latents with compressed keys of an index and a ring of raw ones."""
    heads = 64 // model.tensor_ranks
    shapes = ((3, 3 * 128 * heads), (heads, 128, 128))
    block, state = _make_state(model, shapes, token_bytes=2 * 512, num_prefill_checkpoint_blocks=1)
    latent: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "max_tp_shards": 1}
    for layer in range(45):
        name = f"model.layers.{layer}.self_attn"
        if layer % 4 != 3:
            yield name, state
            continue
        keys = {"head_size": 132, "dtype": BYTES, "tokens_per_state": 4, "cache_role": SparseCacheRole.INDEXER}
        yield f"{name}.indexer.k_cache", MLAAttentionSpec(**latent, **keys, block_stride_alignment=MultipleOf(256))
        ring = {"block_size": 4, "num_kv_heads": 2, "head_size": 128, "dtype": BF16, "head_size_v": 0}
        yield f"{name}.indexer.tail_cache", CircularBufferSpec(**ring, dcp_sharded=False)
        main = {"head_size": 512, "dtype": BF16, "cache_dtype_str": "auto", "is_index_group_leader": True}
        yield f"{name}.attn", MLAAttentionSpec(**latent, **main, block_stride_alignment=1024)


def make_qwen4_exp(model: Model) -> Layers:
    """States, one of them the same on all ranks, and in every fourth layer attention with compressed keys of an index
    and a ring of raw ones."""
    ranks = model.tensor_ranks
    heads = max(2 // ranks, 1)
    shapes = ((3, (2 * 16 + 48) * 128 // ranks), (48 // ranks, 128, 128))
    block, state = _make_state(model, shapes, token_bytes=2 * 2 * 256 * heads)
    alike = replace(
        state,
        shapes=((9, 10240),),
        dtypes=(BF16,),
        tp_replicated=True,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
    )
    key: dict[str, Any] = {"num_kv_heads": 1, "head_size": 128, "dtype": BF16}
    for layer in range(48):
        name = f"model.layers.{layer}"
        if layer == 1:
            yield f"{name}.ple", alike
        if layer % 4 != 3:
            yield f"{name}.linear_attn", state
            continue
        yield f"{name}.self_attn.indexer.raw_key_cache", CircularBufferSpec(block_size=4, head_size_v=0, **key)
        compressed = MLAAttentionSpec(block_size=block, tokens_per_state=4, **key)
        yield f"{name}.self_attn.indexer.compressed_key_cache", compressed
        attention = {"num_kv_heads": heads, "head_size": 256, "dtype": BF16}
        yield f"{name}.self_attn.attn", FullAttentionSpec(block_size=block, **attention)


def make_kimi_k3(model: Model) -> Layers:
    """States, and latents in every fourth layer and in the last."""
    heads = 96 // model.tensor_ranks
    shapes = ((3, 3 * 128 * heads), (heads, 128, 128))
    block, state = _make_state(model, shapes, token_bytes=2 * 576, num_prefill_checkpoint_blocks=1)
    latent = {"num_kv_heads": 1, "head_size": 576, "dtype": BF16, "max_tp_shards": 1, "cache_dtype_str": "auto"}
    for layer in range(93):
        is_full = layer % 4 == 3 or layer == 92
        yield f"model.layers.{layer}.self_attn", MLAAttentionSpec(block_size=block, **latent) if is_full else state


def make_minimax_m3(model: Model) -> Layers:
    """Attention, and from the fourth layer on an index that has the same keys on all ranks."""
    attention = {"num_kv_heads": max(4 // model.tensor_ranks, 1), "head_size": 128, "dtype": BF16}
    index = {"num_kv_heads": 1, "head_size": 128, "dtype": BF16, "cache_role": SparseCacheRole.INDEXER}
    stride = {"block_stride_alignment": MultipleOf(128)}
    for layer in range(60):
        name = f"model.layers.{layer}.self_attn.attn"
        if layer >= 3:
            yield f"{name}.index_cache", MLAAttentionSpec(block_size=model.block_size, **index, **stride)
        yield name, FullAttentionSpec(block_size=model.block_size, **attention, **(stride if layer >= 3 else {}))


def make_nemotron_h(model: Model) -> Layers:
    """States, and attention in four layers; the others keep nothing."""
    shapes = ((3, (128 * 64 + 2 * 8 * 128) // model.tensor_ranks), (128 // model.tensor_ranks, 64, 128))
    heads = 8 // model.tensor_ranks
    block, state = _make_state(model, shapes, token_bytes=2 * 2 * 128 * heads, kind=MambaAttentionBackendEnum.MAMBA2)
    attention = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=128, dtype=BF16)
    for layer, kind in enumerate("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"):
        if kind != "-":
            yield f"model.layers.{layer}.mixer", state if kind == "M" else attention


def make_falcon_h1(model: Model) -> Layers:
    """A state and attention in each layer."""
    shapes = ((3, (3072 + 2 * 256) // model.tensor_ranks), (24 // model.tensor_ranks, 128, 256))
    heads = max(2 // model.tensor_ranks, 1)
    mamba: dict[str, Any] = {"kind": MambaAttentionBackendEnum.MAMBA2, "dtypes": (BF16, BF16)}
    block, state = _make_state(model, shapes, token_bytes=2 * 2 * 128 * heads, **mamba)
    for layer in range(44):
        attention = {"num_kv_heads": heads, "head_size": 128, "dtype": BF16}
        yield f"model.layers.{layer}.self_attn.attn", FullAttentionSpec(block_size=block, **attention)
        yield f"model.layers.{layer}.mamba", state


def make_llama_4(model: Model) -> Layers:
    """Attention within chunks, and to all tokens in every fourth layer."""
    attention: dict[str, Any] = {
        "block_size": model.block_size,
        "num_kv_heads": 8 // model.tensor_ranks,
        "head_size": 128,
        "dtype": BF16,
    }
    for layer in range(48):
        is_full = layer % 4 == 3
        chunks = ChunkedLocalAttentionSpec(attention_chunk_size=8192, **attention)
        yield f"model.layers.{layer}.self_attn.attn", FullAttentionSpec(**attention) if is_full else chunks


def _make_state(
    model: Model,
    shapes: Sequence[tuple[int, ...]],
    *,
    token_bytes: int,
    num_prefill_checkpoint_blocks: int = 0,
    kind: MambaAttentionBackendEnum = MambaAttentionBackendEnum.GDN_ATTN,
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, FP32),
) -> tuple[int, MambaSpec]:
    """Returns a state, and the tokens of a block: so many that a page of attention is no smaller than the state."""
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    block = -(-size // (token_bytes * model.block_size)) * model.block_size
    checkpoints = {
        "num_prefill_checkpoint_blocks": num_prefill_checkpoint_blocks,
        "prefill_checkpoint_alignment": 16 if num_prefill_checkpoint_blocks else None,
    }
    return block, MambaSpec(
        block_size=block,
        shapes=tuple(shapes),
        dtypes=dtypes,
        page_size_padded=block * token_bytes,
        mamba_type=kind,
        mamba_cache_mode="align",
        **checkpoints,
    )


HYBRID: Mapping[str, Any] = {"mamba_cache_mode": "align"}
FLAGSHIPS: Sequence[Model] = (
    Model(
        name="DeepSeek-V4.1",
        config={
            **DEEPSEEK_V3.config,
            "num_key_value_heads": 1,
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "head_dim": 512,
        },
        ranks=8,
        weight_bytes=298.5 * GB,
        parameters=585.8e9,
        active_parameters=17.2e9,
        gpu=H200,
        kv_dtype="fp8_ds_mla",
        block_size=64,
        layout="BLHNC",
        make_layers=make_deepseek_v41,
    ),
    Model(
        name="GLM-5-next",
        config={
            **QWEN3_NEXT_80B.config,
            "num_key_value_heads": 64,
            "num_attention_heads": 64,
            "num_hidden_layers": 45,
            "hidden_size": 4096,
            "head_dim": 256,
        },
        ranks=4,
        weight_bytes=313.3 * GB,
        parameters=313.3e9,
        active_parameters=17.4e9,
        gpu=H200,
        block_size=256,
        extra=HYBRID,
        layout="BLHNC",
        make_layers=make_glm_5_next,
    ),
    Model(
        name="Qwen4-exp",
        config={
            **QWEN3_NEXT_80B.config,
            "num_key_value_heads": 2,
            "num_attention_heads": 24,
            "num_hidden_layers": 48,
            "hidden_size": 2560,
            "head_dim": 256,
        },
        ranks=4,
        weight_bytes=353.9 * GB,
        parameters=177.0e9,
        active_parameters=7.3e9,
        gpu=H200,
        extra=HYBRID,
        layout="BLNHC",
        make_layers=make_qwen4_exp,
    ),
    Model(
        name="Kimi-K3",
        config={
            **QWEN3_NEXT_80B.config,
            "num_key_value_heads": 1,
            "num_attention_heads": 96,
            "num_hidden_layers": 93,
            "hidden_size": 7168,
            "head_dim": 192,
        },
        ranks=8,
        weight_bytes=2779.0 / 2 * GB,
        parameters=2779.0e9,
        active_parameters=104.9e9,
        gpu=B300,
        block_size=128,
        extra=HYBRID,
        make_layers=make_kimi_k3,
    ),
    Model(
        name="MiniMax-M3",
        config={
            **LLAMA_70B.config,
            "num_key_value_heads": 4,
            "num_attention_heads": 64,
            "num_hidden_layers": 60,
            "hidden_size": 6144,
            "head_dim": 128,
        },
        ranks=8,
        weight_bytes=426.2 * GB,
        parameters=426.2e9,
        active_parameters=26.0e9,
        gpu=H200,
        block_size=128,
        make_layers=make_minimax_m3,
    ),
    Model(
        name="Nemotron-H",
        config={**LLAMA_8B.config, "num_hidden_layers": 52},
        ranks=1,
        weight_bytes=16.2 * GB,
        parameters=8.1e9,
        active_parameters=8.1e9,
        extra=HYBRID,
        make_layers=make_nemotron_h,
    ),
    Model(
        name="Falcon-H1",
        config={
            **LLAMA_8B.config,
            "num_key_value_heads": 2,
            "num_attention_heads": 12,
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "head_dim": 128,
        },
        ranks=1,
        weight_bytes=15.2 * GB,
        parameters=7.6e9,
        active_parameters=7.6e9,
        extra=HYBRID,
        make_layers=make_falcon_h1,
    ),
    Model(
        name="Llama-4",
        config={
            **LLAMA_70B.config,
            "num_attention_heads": 40,
            "num_hidden_layers": 48,
            "hidden_size": 5120,
            "head_dim": 128,
        },
        ranks=8,
        weight_bytes=218.0 * GB,
        parameters=109.0e9,
        active_parameters=17.0e9,
        make_layers=make_llama_4,
    ),
)
