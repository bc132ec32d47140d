"""Every kind of KV cache that this vLLM has is kept, rebuilt by the engine, or refused with a reason."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor

from kvoffload.connector.engine.kept_groups import SPECS

pytestmark = pytest.mark.vllm

BASES = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
"""Classes of which no layer has a spec of its own, and the wrapper of layers with different pages."""

PAGES = "its effect is in the page's size or in the tensor's strides, which are read from the configuration"
SHARDS = "`find_replicas` reads it"
ALIGNED = "vLLM aligns every hit to it, and so do we (`hit_alignment`)"
WHO = "the identity has the model and the layer's format, which decide it"
ENGINE = "the engine alone acts on it: blocks and their content stay the same"
FIELDS = {
    "KVCacheSpec": {
        "block_size": "the tokens of a block",
        "dcp_sharded": "a block has the tokens of all ranks that share the context (`count_stripes`)",
        "block_stride_alignment": PAGES,
        "is_draft": ENGINE,
    },
    "AttentionSpec": {
        "num_kv_heads": PAGES,
        "head_size": PAGES,
        "head_size_v": PAGES,
        "dtype": "the layer's dtype",
        "kv_quant_mode": "the layer's quantisation",
        "page_size_padded": PAGES,
        "num_head_slots": PAGES,
        "state_content_bytes": PAGES,
        "tokens_per_state": ALIGNED,
        "max_tp_shards": SHARDS,
    },
    "FullAttentionSpec": {
        "sliding_window": "the engine keeps all blocks of such a layer, and so do we",
        "attention_chunk_size": "the engine keeps all blocks of such a layer, and so do we",
        "non_causal": ENGINE,
    },
    "MLAAttentionSpec": {
        "cache_dtype_str": WHO,
        "alignment": PAGES,
        "model_version": WHO,
        "cache_role": WHO,
        "is_index_group_leader": ENGINE,
        "non_causal_multi_token_decode": ENGINE,
        "topk_buffer_width": ENGINE,
    },
    "SinkFullAttentionSpec": {"sink_len": WHO},
    "RSWASpec": {"rswa_window": "not kept"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": "the chunk"},
    "SlidingWindowSpec": {"sliding_window": "the window", "extra_retained_tokens": "the window"},
    "SlidingWindowMLASpec": {
        "cache_dtype_str": WHO,
        "alignment": PAGES,
        "model_version": WHO,
        "bounded_replay": "the group is not cacheable by prefix, and a hit has to be longer than the window",
    },
    "MambaSpec": {
        "shapes": PAGES,
        "dtypes": "the layer's dtypes",
        "page_size_padded": PAGES,
        "mamba_type": WHO,
        "mamba_cache_mode": "the engine hands off states in mode align alone",
        "num_speculative_blocks": ENGINE,
        "num_prefill_checkpoint_blocks": ENGINE,
        "prefill_checkpoint_alignment": ENGINE,
        "num_heads": PAGES,
        "tokens_per_state": "negative for states: nothing is aligned to it",
        "tp_replicated": "`find_replicas` reads it",
    },
    "HiSparseHotSpec": {"page_size": PAGES, "blocks_per_request": ENGINE},
    "HiSparseResidentSpec": {"page_size": PAGES},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs": "each layer is described by its own"},
    "KVCacheGroupSpec": {
        "layer_names": "the layers",
        "kv_cache_spec": "this table",
        "is_eagle_group": "`drops_last_block` reads the engine's setting",
        "host_resident": "engines with tensors in host memory are idle",
        "enable_kv_transfer": "`find_fate` reads it",
        "role": "only HiSparse has roles; such engines are idle",
    },
    "KVCacheConfig": {
        "num_blocks": "the number of blocks",
        "kv_cache_tensors": "where layers lie",
        "kv_cache_groups": "this table",
        "prefix_cache_retention_interval": "`retention_interval` reads the engine's setting",
        "kv_cache_layout": "the layout",
        "hash_block_size": "the tokens of a block hash",
        "cache_hit_alignment_tokens": ALIGNED,
        "hisparse_host_num_blocks": "such engines are idle",
        "hisparse_host_block_stride": "such engines are idle",
        "hisparse_shared_host_pool": "such engines are idle",
        "kv_tp_replicas": SHARDS,
    },
    "KVCacheTensor": {
        "size": "the allocation",
        "layers": "the layers",
        "layer_stride": "where layers lie",
        "block_stride": "where blocks lie",
        "offset": "where layers lie",
        "host_resident": "such engines are idle",
    },
}
"""How the connector deals with each field of vLLM's description of a cache, by the class that declares it."""


def list_described() -> list[type]:
    found = [one for one in vars(kv_cache_interface).values() if isinstance(one, type)]
    return [one for one in found if issubclass(one, KVCacheSpec)] + [KVCacheGroupSpec, KVCacheConfig, KVCacheTensor]


@pytest.mark.parametrize("kind", list_described(), ids=lambda kind: kind.__name__)
def test_every_class_and_field_of_this_vllm_is_known(kind: type) -> None:
    name = kind.__name__
    if issubclass(kind, KVCacheSpec) and name not in BASES:
        assert name in SPECS, "decide in kept_groups.SPECS whether blocks of this kind are kept"
    inherited = {field.name for base in kind.__mro__[1:] if is_dataclass(base) for field in fields(base)}
    own = {field.name for field in fields(kind)} - inherited
    unknown = own - FIELDS.get(name, {}).keys()
    assert not unknown, "say in FIELDS how the connector deals with these fields"
