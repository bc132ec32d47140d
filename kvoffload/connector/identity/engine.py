"""Who this engine is, from vLLM's resolved configuration and what its layers really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from kvoffload.connector.engine.vllm_compat import hash_seed
from kvoffload.connector.identity.model import describe_model, dtype_name, identify_model
from kvoffload.connector.identity.pages import describe_layers
from kvoffload.keys.identity import Identity, ParallelShape
from kvoffload.kvspec import KVGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def describe_engine(config: VllmConfig, geometry: KVGeometry) -> Identity:
    """Computed by every worker after registration, when every dtype is resolved; ranks of one engine get equal ones.

    Requests add to it, in their blocks' hashes: salt, media, and the adapter's name. What an adapter holds is in
    `adapters`.
    """
    model, parallel = config.model_config, config.parallel_config
    return Identity(
        # A version that computes or arranges pages otherwise, or cures a fault of the one before, does not say so.
        engine=f"vllm {vllm.__version__}",
        model=str(model.model),
        revision=identify_model(model),
        model_config=describe_model(config),
        model_dtype=dtype_name(model.dtype),
        layers=describe_layers(config, geometry),
        geometry=geometry.describe(),
        parallel=ParallelShape(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_seed=hash_seed(config),
    )
