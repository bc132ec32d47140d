"""An engine's KV tensors in their real shapes without memory behind them: their bytes may not be touched."""

from __future__ import annotations

import mmap

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

MAP_NORESERVE = 0x4000
"""Linux's; Python has a name for it from 3.13 on."""


def map_tensors(cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Makes tensors as vLLM's `allocate_kv_cache` does. They take address space only, until the last of them goes."""
    (size,) = {tensor.size for tensor in cache.kv_cache_tensors}
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.int8)
    tensors: dict[str, torch.Tensor] = {}
    layout = KVCacheLayout[cache.kv_cache_layout]
    for tensor in cache.kv_cache_tensors:
        spec = next(group.kv_cache_spec for group in cache.kv_cache_groups if tensor.layers[0] in group.layer_names)
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[tensor.layers[0]]
        views = create_kv_cache_views(memory, spec, cache.num_blocks_of(tensor), layout, tensor)
        tensors.update(zip(tensor.layers, views, strict=True))
    return tensors
