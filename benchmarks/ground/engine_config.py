"""vLLM's configuration of a model, and what vLLM itself makes of its layers: groups, blocks, sizes.

The installed vLLM is built for CPUs. What its platform changes for them is changed back to what it is on CUDA: the
block size, the type of states, asynchronous scheduling, and chunked prefills and prefix caching with MLA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_cache_hit_alignment_tokens,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)

from benchmarks.ground.loaded import LoadedModel
from benchmarks.ground.models import Model

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
"""Drafts without layers of their own: what the scheduler and the connector see of them is their number."""
MTP = {"method": "mtp"}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one engine is run."""

    is_async: bool = True
    runner: int = 2
    """1 or 2: whose order of calls the workers have."""
    max_running: int = 256
    step_tokens: int = 8192
    drafts: int = 0
    """Tokens a step."""
    mtp: bool = False
    """Drafts come from a layer of the model's own, which has a cache."""
    connector: str | None = None
    """The name of a class in `benchmarks.ground`, with its module before a colon; None: no connector."""
    settings: Mapping[str, Any] | None = None
    """The connector's."""


@dataclass(frozen=True)
class EngineConfig:
    """The configurations that the processes of one engine are given."""

    model: Model
    settings: EngineSettings
    vllm: VllmConfig
    loaded: LoadedModel
    """vLLM knows of it as long as this one is there."""
    stages: tuple[KVCacheConfig, ...]
    """There is one for each stage: its ranks are alike."""
    scheduler: KVCacheConfig
    block_size: int
    hash_block_size: int

    @property
    def worker(self) -> KVCacheConfig:
        """Returns what the first rank is given."""
        return self.stages[0]


def make_config(model: Model, settings: EngineSettings, folder: Path) -> EngineConfig:
    """Makes a configuration as `EngineCore` makes it, and writes the model's config into `folder`."""
    vllm = _make_vllm_config(model, settings, folder)
    specs = make_layer_specs(model, vllm)
    vllm.cache_config.mamba_block_size = max(
        (spec.block_size for spec in specs.values() if isinstance(spec, MambaSpec)), default=None
    )
    loaded = LoadedModel(model, specs)
    vllm.compilation_config.static_forward_context.update(loaded.layers)
    parts = [part for part in _divide(specs, model.stages) for _ in range(model.tensor_ranks)]
    workers = get_kv_cache_configs(vllm, parts, [model.cache_bytes] * model.ranks)
    for worker in workers:
        worker.kv_cache_layout = model.layout
    scheduler = generate_scheduler_kv_cache_config(workers)
    vllm.cache_config.num_gpu_blocks = scheduler.num_blocks
    specs_of_groups = [group.kv_cache_spec for group in scheduler.kv_cache_groups]
    vllm.cache_config.block_size = min(spec.block_size for spec in specs_of_groups if spec.prefix_cacheable)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler, vllm)
    alignment = resolve_cache_hit_alignment_tokens(scheduler, vllm, block_size, hash_block_size)
    for cache in (*workers, scheduler):
        cache.hash_block_size = hash_block_size
        cache.cache_hit_alignment_tokens = alignment
    stages = tuple(workers[:: model.tensor_ranks])
    return EngineConfig(model, settings, vllm, loaded, stages, scheduler, block_size, hash_block_size)


def make_layer_specs(model: Model, vllm: VllmConfig) -> dict[str, KVCacheSpec]:
    """Makes the spec of each layer of one rank, as vLLM's own layers make it."""
    if model.make_layers is not None:
        return dict(model.make_layers(model))
    makers = _SpecMakers(model, vllm)
    kinds = _list_kinds(model.config)
    if drafts_by_layer(vllm):
        kinds.append("latent" if kinds[-1] == "latent" else "full")
    return {f"model.layers.{layer}.attn": makers.make(kind) for layer, kind in enumerate(kinds)}


def count_distinct_bytes(config: EngineConfig) -> list[int]:
    """Returns the bytes of a block in each group, of all stages: each byte once, as one rank alone would have them."""
    alone = make_layer_specs(replace(config.model, ranks=1, stages=1), config.vllm)
    sizes = []
    for groups in zip(*(stage.kv_cache_groups for stage in config.stages), strict=True):
        stripes = config.model.context_ranks
        layers = [
            (name, resolve_dcp_kv_block_size(group.kv_cache_spec, stripes))
            for group in groups
            for name in group.layer_names
        ]
        sizes.append(sum(_count_block_bytes(alone[name], block_size) for name, block_size in layers))
    return sizes


def _count_block_bytes(spec: KVCacheSpec, block_size: int) -> int:
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=None).page_size_bytes
    return int(spec.real_page_size_bytes) * block_size // spec.block_size


def _divide(specs: Mapping[str, KVCacheSpec], stages: int) -> list[dict[str, KVCacheSpec]]:
    """Divides a model's layers among the stages of a pipeline as vLLM does."""
    names = list(specs)
    bounds = [get_pp_indices(len(names), stage, stages) for stage in range(stages)]
    return [{name: specs[name] for name in names[begin:end]} for begin, end in bounds]


def drafts_by_layer(vllm: VllmConfig) -> bool:
    """MTP: vLLM registers the layer after all others."""
    return vllm.speculative_config is not None and vllm.speculative_config.method == MTP["method"]


def _make_vllm_config(model: Model, settings: EngineSettings, folder: Path) -> VllmConfig:
    place = folder / model.name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({**model.config, "num_nextn_predict_layers": int(settings.mtp)}))
    # A model's revision is a digest of its weights: these have none.
    (place / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    transfer = None
    if settings.connector is not None:
        module, _, name = settings.connector.partition(":")
        transfer = {
            "kv_connector": name,
            "kv_connector_module_path": f"benchmarks.ground.{module}",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(settings.settings or {}),
        }
    arguments = {
        "model": str(place),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "tensor_parallel_size": model.tensor_ranks,
        "pipeline_parallel_size": model.stages,
        "nnodes": model.nodes,
        "decode_context_parallel_size": model.context_ranks,
        "distributed_executor_backend": "mp",
        "kv_cache_dtype": model.kv_dtype,
        "block_size": model.block_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.step_tokens,
        "kv_transfer_config": transfer,
        "speculative_config": dict(MTP if settings.mtp else DRAFTS, num_speculative_tokens=settings.drafts)
        if settings.drafts
        else None,
        **model.extra,
    }
    vllm = EngineArgs(**arguments).create_engine_config()
    vllm.scheduler_config.async_scheduling = settings.is_async
    # MLA has none of these on a CPU.
    vllm.cache_config.enable_prefix_caching = True
    vllm.scheduler_config.enable_chunked_prefill = True
    vllm.scheduler_config.max_num_batched_tokens = settings.step_tokens
    vllm.cache_config.block_size = model.block_size
    vllm.cache_config.mamba_ssm_cache_dtype = "auto"
    vllm.cache_config.kv_cache_layout = model.layout
    return vllm


def _list_kinds(config: Mapping[str, Any]) -> list[str]:
    count = config["num_hidden_layers"]
    if "layer_kinds" in config:
        return list(config["layer_kinds"])
    if "kv_lora_rank" in config:
        return ["latent"] * count
    if "layer_types" in config:
        return ["window" if kind == "sliding_attention" else "full" for kind in config["layer_types"]]
    if every := config.get("sliding_window_pattern"):
        return ["full" if (at + 1) % every == 0 else "window" for at in range(count)]
    if every := config.get("full_attention_interval"):
        return ["full" if (at + 1) % every == 0 else "state" for at in range(count)]
    return ["full"] * count


class _SpecMakers:
    """One for each kind of layer."""

    def __init__(self, model: Model, vllm: VllmConfig) -> None:
        self._config = model.config
        self._ranks = model.tensor_ranks
        self._vllm = vllm
        self._dtype = torch.uint8 if model.kv_dtype == "fp8" else torch.bfloat16
        self._quant = get_kv_quant_mode(model.kv_dtype)
        self._block_size = self._find_block_size(model.block_size)

    def make(self, kind: str) -> KVCacheSpec:
        config = self._config
        if kind == "state":
            return self._make_state(padded=self._make_full(self._block_size).page_size_bytes)
        if kind == "latent":
            return MLAAttentionSpec(
                block_size=self._block_size,
                num_kv_heads=1,
                max_tp_shards=1,
                head_size=config["kv_lora_rank"] + config["qk_rope_head_dim"],
                dtype=self._dtype,
                cache_dtype_str="auto",
                kv_quant_mode=self._quant,
            )
        if kind == "index":
            # fp8 keys, each with a scale.
            size = config["index_head_dim"] + 4
            index = {"head_size": size, "dtype": torch.uint8, "cache_role": SparseCacheRole.INDEXER}
            return MLAAttentionSpec(block_size=self._block_size, num_kv_heads=1, max_tp_shards=1, **index)
        if kind in ("replayed", "ring"):
            return self._make_scratch(kind)
        if kind == "window":
            return SlidingWindowSpec(
                **self._attention(self._block_size),
                sliding_window=config["sliding_window"],
            )
        return self._make_full(self._block_size)

    def _make_scratch(self, kind: str) -> KVCacheSpec:
        """A window of latents that the engine computes again after a hit, or a ring of keys that are not compressed
        yet, as DeepSeek-V4.1 has them."""
        latent = self._config["kv_lora_rank"] + self._config["qk_rope_head_dim"]
        given: dict[str, Any] = {"block_size": self._block_size, "num_kv_heads": 1, "dtype": self._dtype}
        if kind == "ring":
            return CircularBufferSpec(head_size=latent, head_size_v=0, **given)
        window = self._config["replayed_tokens"]
        return SlidingWindowMLASpec(head_size=latent, sliding_window=window, bounded_replay=True, **given)

    def _make_full(self, block_size: int) -> FullAttentionSpec:
        return FullAttentionSpec(**self._attention(block_size))

    def _attention(self, block_size: int) -> dict[str, Any]:
        config = self._config
        return {
            "block_size": block_size,
            "num_kv_heads": max(config["num_key_value_heads"] // self._ranks, 1),
            "head_size": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            "dtype": self._dtype,
            "kv_quant_mode": self._quant,
        }

    def _make_state(self, *, padded: int | None) -> MambaSpec:
        config, cache = self._config, self._vllm.cache_config
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            self._ranks,
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
            self._vllm.num_speculative_tokens,
        )
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            torch.bfloat16, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )
        return MambaSpec(
            shapes=tuple(shapes),
            dtypes=tuple(dtypes),
            block_size=self._block_size,
            page_size_padded=padded,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=self._vllm.num_speculative_tokens,
        )

    def _find_block_size(self, kernel: int) -> int:
        """A page of attention is no smaller than a state, as vLLM's platforms see to it."""
        self._block_size = kernel
        if "linear_num_value_heads" not in self._config:
            return kernel
        state = self._make_state(padded=None).page_size_bytes
        token = self._make_full(1).page_size_bytes
        return -(-state // (token * kernel)) * kernel
