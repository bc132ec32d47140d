"""Finds the tensor ranks of an engine that hold the same bytes of a layer.

vLLM tells it for MLA layers, and for recurrent layers whose state is not divided. If a model has fewer KV heads than
ranks, several ranks in a row have the same head, and their projections know how many. For other layers it is not
certain, so each rank counts as different: most recurrent layers, for example, divide their states in ways of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.geometry import layer_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def find_replicas(config: VllmConfig, cache: KVCacheConfig) -> dict[str, int]:
    """Returns by layer how many tensor ranks in a row hold the same bytes, for layers where that is certain."""
    tensor_ranks = config.parallel_config.tensor_parallel_size
    context_ranks = config.parallel_config.decode_context_parallel_size
    if tensor_ranks == 1:
        return {}
    layers, projections = vllm_compat.find_layers(config), vllm_compat.find_projections(vllm_compat.loaded_modules())
    found = {}
    for group in cache.kv_cache_groups:
        for name in group.layer_names:
            layer, spec = layers.get(name), layer_spec(group.kv_cache_spec, name)
            replicas = count_replicas(spec, layer, projections.get(id(layer)), tensor_ranks)
            # Ranks that share the context hold other tokens of a block, each its own.
            if replicas > 1 and vllm_compat.count_stripes(spec, context_ranks) == 1:
                found[name] = replicas
    return found


def count_replicas(spec: KVCacheSpec, layer: Any, projection: Any, tensor_ranks: int) -> int:
    """Returns how many tensor ranks hold the same bytes of a layer; 1 if that is not certain. `projection` is the
    module that makes its keys and values, if known."""
    if getattr(spec, "tp_replicated", False):
        return tensor_ranks
    if not isinstance(spec, AttentionSpec):
        return 1
    shards = vllm_compat.most_shards(spec)
    if shards is None and vllm_compat.has_latent(layer) and spec.num_kv_heads == 1:
        shards = 1
    if shards is None and projection is not None and not projection.disable_tp:
        heads = projection.total_num_kv_heads
        # The layer, its pages and its projection have to agree on what a rank has.
        if heads < tensor_ranks and spec.num_kv_heads == projection.num_kv_heads == layer.num_kv_heads == 1:
            shards = heads
    if not shards or shards >= tensor_ranks or tensor_ranks % shards:
        return 1
    return tensor_ranks // shards
