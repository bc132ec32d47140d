"""A model as a worker finds it loaded: its layers, what projects to their keys and values, and next to no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec, SparseCacheRole

from benchmarks.ground.models import Model


class LoadedModel(torch.nn.Module):
    """Stands for what any rank of a stage has loaded: they are alike. vLLM's own notes of it end with it."""

    def __init__(self, model: Model, specs: Mapping[str, KVCacheSpec]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.blocks = torch.nn.ModuleList(_make_block(model, *layer) for layer in specs.items())
        self.layers: dict[str, Any] = {name: block.attn for name, block in zip(specs, self.blocks, strict=True)}
        """These are the attention layers, by the names of their caches."""
        for module in self.modules():
            # As loaders do, which may have to load it again.
            get_layerwise_info(module)


class _Backend:
    @staticmethod
    def get_name() -> str:
        return "VIRTUAL"


def _make_block(model: Model, name: str, spec: KVCacheSpec) -> torch.nn.Module:
    block = torch.nn.Module()
    is_index = isinstance(spec, MLAAttentionSpec) and spec.cache_role is SparseCacheRole.INDEXER
    # An attention layer's further cache has a module of its own in vLLM.
    if isinstance(spec, MambaSpec) or is_index or name.endswith("_cache"):
        block.attn = _make(torch.nn.Module, kv_cache_dtype=model.kv_dtype)
        return block
    is_latent = isinstance(spec, MLAAttentionSpec)
    all_heads = 1 if is_latent else model.config["num_key_value_heads"]
    heads = max(all_heads // model.tensor_ranks, 1)
    block.attn = _make(
        MLAAttention if is_latent else Attention,
        kv_cache_dtype=model.kv_dtype,
        num_kv_heads=heads,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attn_backend=_Backend,
        # An unquantised cache has none.
        **({"_k_scale": torch.ones(()), "_v_scale": torch.ones(())} if model.kv_dtype != "auto" else {}),
    )
    if not is_latent:
        block.qkv_proj = _make(QKVParallelLinear, total_num_kv_heads=all_heads, num_kv_heads=heads, disable_tp=False)
    return block


def _make(kind: type[torch.nn.Module], **values: Any) -> torch.nn.Module:
    """One of vLLM's own classes, with what is asked of it and nothing to compute with."""
    module: torch.nn.Module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in values.items():
        setattr(module, name, value)
    return module
