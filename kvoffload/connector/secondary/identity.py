"""The identity of an engine whose chunks a secondary tier keeps. It has the same fields as for our own connector, read
from what the scheduler's process knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.geometry import describe_group_layer
from kvoffload.connector.identity.engine import describe_layer_content
from kvoffload.connector.identity.model import describe_model, dtype_name, identify_model
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.canonical import Plain
from kvoffload.keys.identity import Identity, LayerDtype, ParallelShape
from kvoffload.kvspec import LayerKind, Quantisation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig


def describe_tier(config: VllmConfig, cache: KVCacheConfig, rows: OffloadingConfig, *, row_bytes: int) -> Identity:
    """Describes an engine. `rows` is how vLLM lays chunks out in its CPU tier. IdentityError, UnsupportedError: the
    engine cannot be told apart from others.

    With a worker in the scheduler's process, the layers show the content of their pages. If workers have processes of
    their own, the description has the causes of that content: the checkpoint, the kernels asked for, the machine.
    """
    model, parallel = config.model_config, config.parallel_config
    if vllm_compat.calculates_scales(config) and _is_quantised(cache):
        raise UnsupportedError(
            "this engine calculates new KV scales at every start, and its secondary tiers never see them",
            remedy="turn calculate_kv_scales off",
        )
    return Identity(
        # The name differs from the connector's, whose records are arranged otherwise.
        engine=f"vllm {vllm.__version__} tier",
        model=str(model.model),
        revision=identify_model(model),
        model_config={
            **describe_model(config),
            "platform": vllm_compat.describe_platform(),
            "attention": vllm_compat.attention_choice(config),
            "cache dtype": str(config.cache_config.cache_dtype),
        },
        model_dtype=dtype_name(model.dtype),
        layers=_describe_layers(config, cache),
        geometry=_describe_rows(cache, rows, row_bytes),
        parallel=ParallelShape(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
            kv_replicas=vllm_compat.kv_replicas(cache),
        ),
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_seed=vllm_compat.hash_seed(config),
    )


def names_are_private(config: VllmConfig) -> bool:
    """Whether two engines of one identity may compute different bytes under one key: keys have an adapter's name, and
    a tier knows nothing else of it."""
    return getattr(config, "lora_config", None) is not None


def find_prefix_groups(cache: KVCacheConfig) -> frozenset[int]:
    """Returns the numbers of the groups in which all chunks before a boundary are needed."""
    return frozenset(
        number
        for number, group in enumerate(cache.kv_cache_groups)
        if all(
            describe_group_layer(cache, number, name).kind in (LayerKind.FULL_ATTENTION, LayerKind.MLA)
            for name in group.layer_names
        )
    )


def _is_quantised(cache: KVCacheConfig) -> bool:
    return any(
        describe_group_layer(cache, number, name).quantisation is not Quantisation.NONE
        for number, group in enumerate(cache.kv_cache_groups)
        for name in group.layer_names
    )


def _describe_layers(config: VllmConfig, cache: KVCacheConfig) -> tuple[LayerDtype, ...]:
    known = vllm_compat.find_layers(config)
    is_cut = config.parallel_config.tensor_parallel_size > 1
    described = []
    for number, group in enumerate(cache.kv_cache_groups):
        for name in group.layer_names:
            spec = describe_group_layer(cache, number, name)
            if name in known:
                described.append(describe_layer_content(spec, known[name], is_cut=is_cut))
            else:
                described.append(LayerDtype(layer=name, dtype=spec.dtype, quantisation=str(spec.quantisation)))
    return tuple(described)


def _describe_rows(cache: KVCacheConfig, rows: OffloadingConfig, row_bytes: int) -> dict[str, Plain]:
    if not row_bytes:
        raise IdentityError("the engine's CPU tier has no rows", remedy="give it more cpu_bytes_to_use")
    return {
        "row bytes": row_bytes,
        "bytes of a block and rank": rows.worker_kv_bytes_per_block,
        "blocks in a chunk": rows.cache.blocks_per_chunk,
        "tokens of a hash": rows.cache.tokens_per_hash,
        "layout": str(rows.kv_cache_layout),
        "one copy of replicas": rows.replicated_layout,
        "canonical": rows.canonical_layout,
        "groups": [
            {
                "number": group.group_id,
                "tokens": group.tokens_per_block,
                "layers": list(group.layer_names),
                "pages": repr(cache.kv_cache_groups[group.group_id].kv_cache_spec),
            }
            for group in rows.groups
        ],
        # Offsets and strides of layers grow with the number of blocks, and no row does.
        "tensors": [[*tensor.layers] for tensor in cache.kv_cache_tensors],
    }
