"""The engine's identity, from vLLM's resolved configuration and the actual content of its layers."""

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
    """Describes each layer that has pages or shares them. Called after weights are loaded, when scales are final."""
    known = vllm_compat.find_layers(config)
    is_cut = config.parallel_config.tensor_parallel_size > 1 or geometry.units is not None
    return tuple(describe_layer_content(spec, known.get(spec.name), is_cut=is_cut) for spec in geometry.layers.values())


def refuse_ruined_scales(config: VllmConfig, geometry: KVGeometry) -> None:
    """UnsupportedError: scales were calculated from garbage, in a model with recurrent layers (vLLM #37565).

    vLLM turns this off by itself, and has no such option since 0.32. An engine that still does it has made its scales
    before it registers, so they cannot be corrected here.
    """
    decision = decide_scales(
        model=config.model_config.model,
        calculate_scales=vllm_compat.calculates_scales(config),
        layers=geometry.layers.values(),
    )
    if decision.reason:
        raise UnsupportedError(decision.reason, remedy="turn calculate_kv_scales off")


def describe_layer_content(spec: LayerSpec, layer: Any, *, is_cut: bool) -> LayerDtype:
    """Describes a layer's content. `layer` is the engine's own; None: it has none of this name. `is_cut`: ranks hold
    different heads of it, in this engine or in one that reads its records."""
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
    """Returns the identity. Every worker computes it when every dtype is resolved; ranks of one engine get equal ones.

    Requests add to it in their blocks' hashes: salt, media, and the adapter's name. For an adapter's contents see
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
        # The full version, as a release may compute or arrange pages otherwise, or correct faults, without a notice.
        engine=f"vllm {vllm.__version__}",
        model=str(model.model),
        revision=identify_model(model),
        model_config={**describe_model(config), **_describe_stripes(parallel)},
        model_dtype=dtype_name(model.dtype),
        layers=describe_layers(config, geometry),
        geometry=geometry.describe(),
        parallel=shape,
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_seed=vllm_compat.hash_seed(config),
    )


def _describe_stripes(parallel: Any) -> dict[str, int]:
    """Describes which tokens of a block each rank has; empty if every rank has all of them."""
    if parallel.decode_context_parallel_size == 1:
        return {}
    return {"tokens of a stripe": int(getattr(parallel, "cp_kv_cache_interleave_size", 1))}
