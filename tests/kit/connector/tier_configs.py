"""vLLM's own summary of an engine for its tiers, of the stand-ins in `engine_configs`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)


def make_rows(config: Any, cache: KVCacheConfig, *, blocks_per_chunk: int = 1) -> OffloadingConfig:
    parallel = config.parallel_config
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=group.kv_cache_spec.block_size, layer_names=tuple(group.layer_names), group_id=number
            )
            for number, group in enumerate(cache.kv_cache_groups)
        ),
        worker_kv_bytes_per_block=cache.kv_cache_tensors[0].size // cache.num_blocks,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=config.kv_transfer_config.engine_id,
        model=OffloadingModelConfig(name=config.model_config.model, dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=cache.hash_block_size or 4, blocks_per_chunk=blocks_per_chunk),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout=cache.kv_cache_layout,
    )
