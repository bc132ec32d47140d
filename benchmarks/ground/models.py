"""Models as they are deployed: what their published configs say, on how many GPUs, and what is left for the KV cache.

Configs are the fields of the published `config.json` that decide about the cache. Weights are the checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

GB = 10**9
USABLE_SHARE = 0.9
"""The share of a GPU's memory that vLLM may use: its `gpu_memory_utilization`, as most deployments have it."""
WORKSPACE_BYTES = 8 * GB
"""Of a rank, for activations, CUDA graphs and NCCL."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. Rates are those that kernels achieve, with those of the data sheet for comparison."""

    name: str
    memory_bytes: int
    flops: float
    """A second, dense bf16: 400 of the 989 TFLOP/s of the data sheet, as prefills of large models reach."""
    memory_rate: float
    """Bytes a second: three quarters of the data sheet's."""


H100 = Gpu(name="H100", memory_bytes=80 * GB, flops=400e12, memory_rate=2.5e12)
"""SXM: 3.35 TB/s by the data sheet."""
H200 = Gpu(name="H200", memory_bytes=141 * GB, flops=400e12, memory_rate=3.6e12)
"""4.8 TB/s by the data sheet."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One deployment."""

    name: str
    config: Mapping[str, Any]
    ranks: int
    """The number of ranks of all stages together."""
    weight_bytes: float
    parameters: float
    active_parameters: float
    """The parameters that one token uses: fewer than all where experts are chosen."""
    gpu: Gpu = H100
    kv_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int = 131072
    stages: int = 1
    """Of a pipeline, which divides the layers; its ranks divide the heads of a stage's layers."""
    nodes: int = 1
    """Machines that the ranks are on, each with a session of its own."""
    context_ranks: int = 1
    """Tensor ranks among which the tokens of a block are striped (decode context parallelism)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    layout: str = "LBNHC"
    """The order of a block's dimensions in memory, by vLLM's name: the one that the model's kernels prefer."""
    make_layers: Callable[[Model], Iterable[tuple[str, Any]]] | None = None
    """Makes the names and vLLM's specs of all caches of one rank. None: they follow from the config."""

    @property
    def cache_bytes(self) -> int:
        """Returns the size of one rank's KV cache."""
        return int(self.gpu.memory_bytes * USABLE_SHARE - self.weight_bytes / self.ranks - WORKSPACE_BYTES)

    @property
    def tensor_ranks(self) -> int:
        """Returns the number of ranks of one stage."""
        return self.ranks // self.stages

    @property
    def bytes_per_parameter(self) -> float:
        return self.weight_bytes / self.parameters


_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
_LLAMA_70B: Mapping[str, Any] = {
    **_LLAMA,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "hidden_size": 8192,
    "intermediate_size": 28672,
}

LLAMA_8B = Model(
    name="Llama-3.1-8B",
    config={
        **_LLAMA,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
    ranks=1,
    weight_bytes=16.1 * GB,
    parameters=8.03e9,
    active_parameters=8.03e9,
)
LLAMA_70B = Model(
    name="Llama-3.1-70B",
    config=_LLAMA_70B,
    ranks=8,
    weight_bytes=141.1 * GB,
    parameters=70.6e9,
    active_parameters=70.6e9,
)
LLAMA_70B_FP8 = Model(
    name="Llama-3.1-70B-fp8-kv",
    config=_LLAMA_70B,
    ranks=8,
    weight_bytes=141.1 * GB,
    parameters=70.6e9,
    active_parameters=70.6e9,
    kv_dtype="fp8",
)
DEEPSEEK_V3 = Model(
    name="DeepSeek-V3",
    config={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 163840,
    },
    ranks=8,
    weight_bytes=688.6 * GB,
    parameters=671e9,
    active_parameters=37e9,
    gpu=H200,
    block_size=64,
)
"""The model runs on H200, since its weights do not fit 8 x H100. FlashMLA wants blocks of 64 tokens."""
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepSeek-V3.2",
    config={**DEEPSEEK_V3.config, "index_head_dim": 128, "layer_kinds": ["latent", "index"] * 61},
)
"""Each layer has latents and the keys of a sparse index, all in one group."""
GPT_OSS_120B = Model(
    name="gpt-oss-120b",
    config={
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
    },
    ranks=2,
    weight_bytes=65.3 * GB,
    parameters=116.8e9,
    active_parameters=5.1e9,
)
GEMMA_3_27B = Model(
    name="gemma-3-27b",
    config={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 168,
        "vocab_size": 262208,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
    },
    ranks=2,
    weight_bytes=54.8 * GB,
    parameters=27.4e9,
    active_parameters=27.4e9,
)
GEMMA_3_4B = replace(
    GEMMA_3_27B,
    name="gemma-3-4b",
    config={
        **GEMMA_3_27B.config,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "query_pre_attn_scalar": 256,
    },
    ranks=1,
    weight_bytes=8.6 * GB,
    parameters=4.3e9,
    active_parameters=4.3e9,
)
QWEN3_NEXT_80B = Model(
    name="Qwen3-Next-80B",
    config={
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 262144,
    },
    ranks=4,
    weight_bytes=162.7 * GB,
    parameters=81.3e9,
    active_parameters=3.9e9,
    extra={"mamba_cache_mode": "align"},
)

MODELS: Sequence[Model] = (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_FP8,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GPT_OSS_120B,
    GEMMA_3_27B,
    GEMMA_3_4B,
    QWEN3_NEXT_80B,
)

SHAPES: Mapping[str, Sequence[Model]] = {
    LLAMA_70B.name: (
        replace(LLAMA_70B, stages=2),
        replace(LLAMA_70B, ranks=16),
        replace(LLAMA_70B, ranks=32, stages=4),
        replace(LLAMA_70B, ranks=16, nodes=2),
        replace(LLAMA_70B, ranks=16, stages=2, nodes=2),
    ),
    DEEPSEEK_V3.name: (
        DEEPSEEK_V3,
        replace(DEEPSEEK_V3, ranks=16, stages=2),
        replace(DEEPSEEK_V3, context_ranks=8),
    ),
    GEMMA_3_27B.name: (replace(GEMMA_3_27B, ranks=4, stages=2),),
    QWEN3_NEXT_80B.name: (QWEN3_NEXT_80B, replace(QWEN3_NEXT_80B, stages=2)),
}
"""How the ranks of a model may divide it, by its name: in stages, of unequal layers too; more ranks than KV heads."""
