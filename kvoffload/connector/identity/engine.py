"""Who this engine is, from vLLM's resolved configuration and what its layers really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.identity.model import describe_model, dtype_name, identify_model
from kvoffload.errors import IdentityError, UnsupportedError
from kvoffload.keys.identity import Identity, LayerDtype, ParallelShape
from kvoffload.kvspec import KVGeometry, LayerSpec, Quantisation, decide_scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def describe_layers(config: VllmConfig, geometry: KVGeometry) -> tuple[LayerDtype, ...]:
    """One for each layer that has pages or shares them. Weights are loaded by now: their scales are what they stay."""
    known = vllm_compat.find_layers(config)
    is_cut = config.parallel_config.tensor_parallel_size > 1 or geometry.units is not None
    return tuple(describe_layer_content(spec, known.get(spec.name), is_cut=is_cut) for spec in geometry.layers.values())


def refuse_ruined_scales(config: VllmConfig, geometry: KVGeometry) -> None:
    """UnsupportedError: scales were calculated beside recurrent layers, from garbage (vLLM #37565).

    vLLM turns that off by itself, and has no such option since 0.32. An engine that still does it has made its scales
    before it registers, so that they cannot be put right here.
    """
    decision = decide_scales(
        model=config.model_config.model,
        calculate_scales=vllm_compat.calculates_scales(config),
        layers=geometry.layers.values(),
    )
    if decision.reason:
        raise UnsupportedError(decision.reason, remedy="turn calculate_kv_scales off")


def describe_layer_content(spec: LayerSpec, layer: Any, *, is_cut: bool) -> LayerDtype:
    """`layer`: the engine's own; None: it has none for this name. `is_cut`: ranks hold different heads of it,
    in this engine or in one that reads what it saves."""
    if layer is None and spec.quantisation is not Quantisation.NONE:
        raise IdentityError(
            f"layer {spec.name} is quantised ({spec.quantisation}) and its scales are nowhere to be found",
            remedy="run this model with an unquantised KV cache, and report it with the model's name",
        )
    scales = vllm_compat.page_scales(layer)
    if is_cut and any(len(part) > 1 for part in scales):
        # Every rank has the scales of its own heads, and the ranks of an engine have one identity.
        raise IdentityError(
            f"layer {spec.name} has a KV scale for each head, and the ranks of this engine hold different heads",
            remedy="use a checkpoint with one scale per layer, or no tensor parallelism and no shared_shapes",
        )
    return LayerDtype(
        layer=spec.name,
        dtype=vllm_compat.page_format(layer) or spec.dtype,
        quantisation=str(spec.quantisation),
        writer=vllm_compat.page_writer(layer),
        scales=tuple(number for part in scales for number in part),
    )


def describe_engine(config: VllmConfig, geometry: KVGeometry) -> Identity:
    """Computed by every worker after registration, when every dtype is resolved; ranks of one engine get equal ones.

    Requests add to it, in their blocks' hashes: salt, media, and the adapter's name. What an adapter holds is in
    `adapters`.
    """
    model, parallel = config.model_config, config.parallel_config
    shape = ParallelShape(
        # Units are the same in engines of all sizes, and the geometry says that there are some.
        tensor=parallel.tensor_parallel_size if geometry.units is None else 1,
        pipeline=parallel.pipeline_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
    )
    return Identity(
        # A version that computes or arranges pages otherwise, or cures a fault of the one before, does not say so.
        engine=f"vllm {vllm.__version__}",
        model=str(model.model),
        revision=identify_model(model),
        model_config=describe_model(config),
        model_dtype=dtype_name(model.dtype),
        layers=describe_layers(config, geometry),
        geometry=geometry.describe(),
        parallel=shape,
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_seed=vllm_compat.hash_seed(config),
    )
