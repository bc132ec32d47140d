"""vLLM's own configuration objects without an engine: specs, KVCacheConfig, tensors, and a stand-in for VllmConfig."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

HEADS = 2
HEAD_SIZE = 8
TOKEN_BYTES = HEADS * 2 * HEAD_SIZE * 2
"""Keys and values of a token in one layer of the default attention: bfloat16."""


def full(block_size: int = 4, **changes: Any) -> FullAttentionSpec:
    given = {"num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    return FullAttentionSpec(block_size=block_size, **{**given, **changes})


def window(block_size: int = 4, tokens: int = 6, **changes: Any) -> SlidingWindowSpec:
    given = {"num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16, "sliding_window": tokens}
    return SlidingWindowSpec(block_size=block_size, **{**given, **changes})


def chunked(block_size: int = 4, tokens: int = 8, **changes: Any) -> ChunkedLocalAttentionSpec:
    given = {"num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16, "attention_chunk_size": tokens}
    return ChunkedLocalAttentionSpec(block_size=block_size, **{**given, **changes})


def mla(block_size: int = 4, **changes: Any) -> MLAAttentionSpec:
    given = {"num_kv_heads": 1, "head_size": 24, "head_size_v": 0, "dtype": torch.bfloat16}
    return MLAAttentionSpec(block_size=block_size, **{**given, **changes})


def latent_window(block_size: int = 4, tokens: int = 8, **changes: Any) -> SlidingWindowMLASpec:
    given = {"num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16, "sliding_window": tokens}
    return SlidingWindowMLASpec(block_size=block_size, **{**given, **changes})


def ring(tokens: int = 4, **changes: Any) -> CircularBufferSpec:
    """One block for each request, with the keys that a sparse indexer has not compressed yet."""
    given = {"num_kv_heads": 1, "head_size": 24, "head_size_v": 0, "dtype": torch.bfloat16}
    return CircularBufferSpec(block_size=tokens, **{**given, **changes})


def recurrent(block_size: int = 4, page_bytes: int = 0, **changes: Any) -> MambaSpec:
    """Two states of 24 + 128 bytes; `page_bytes` pads the page, as vLLM does in models that have attention too."""
    given = {
        "shapes": ((3, 4), (2, 4, 4)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
        "page_size_padded": page_bytes or block_size * TOKEN_BYTES,
    }
    return MambaSpec(block_size=block_size, **{**given, **changes})


def per_token_head(block_size: int = 4, **changes: Any) -> FullAttentionSpec:
    """int8 with one float32 scale inside the page for each key and value of a head."""
    content = 2 * (HEAD_SIZE + 4)
    given = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD, "state_content_bytes": content}
    return full(block_size, **{**given, **changes})


def make_config(
    *groups: tuple[Sequence[str], KVCacheSpec], num_blocks: int = 8, layout: str = "LBHNC", context_ranks: int = 1
) -> KVCacheConfig:
    """Returns what vLLM's engine core makes of these groups. The tokens of a block are striped among
    `context_ranks`."""
    stand_in = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    specs = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    config = get_kv_cache_config_from_groups(stand_in, specs, 1 << 20)  # type: ignore[arg-type]
    sizes = [resolve_dcp_kv_block_size(spec, context_ranks) for _, spec in groups]
    config.kv_cache_layout = layout
    config.hash_block_size = gcd(*sizes)
    config.cache_hit_alignment_tokens = lcm(*sizes)
    return config


def make_tensors(config: KVCacheConfig, kernel_block_sizes: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Makes the tensors that vLLM's worker allocates for a configuration and hands to `register_kv_caches`."""
    assert config.kv_cache_layout is not None
    return allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout[config.kv_cache_layout], kernel_block_sizes=kernel_block_sizes
    )


class HfConfig:
    """A model's configuration as transformers gives it."""

    def __init__(self, **values: Any) -> None:
        self.values = {"hidden_size": 16, "rope_theta": 10000.0, **values}
        self._commit_hash = values.get("_commit_hash")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


class AttentionLayer:
    """The part of a vLLM attention layer that describes the contents of its pages."""

    def __init__(
        self, *, dtype: str = "auto", backend: str = "CPU_ATTN", scales: tuple[Any, Any] = (1.0, 1.0), **more: Any
    ) -> None:
        self.kv_cache_dtype = dtype
        self._k_scale, self._v_scale = (torch.tensor(scale) for scale in scales)
        self.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: backend)
        vars(self).update(more)


def make_vllm_config(
    *, extra: dict[str, Any] | None = None, layers: dict[str, Any] | None = None, role: str = "kv_both"
) -> Any:
    """Returns as much of VllmConfig as the connector reads. Each part may be changed afterwards."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="acme/tiny",
            revision="0" * 40,
            hf_config=HfConfig(),
            dtype=torch.bfloat16,
            quantization=None,
            max_model_len=4096,
            seed=0,
            use_mla=False,
            get_total_num_kv_heads=lambda: HEADS,
        ),
        quant_config=None,
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        cache_config=SimpleNamespace(
            block_size=4,
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            data_parallel_size=1,
            data_parallel_size_local=1,
            world_size=1,
            nnodes=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        kv_events_config=None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVOffloadConnector",
            kv_role=role,
            kv_connector_extra_config={"memory": "64MiB", **(extra or {})},
        ),
    )
