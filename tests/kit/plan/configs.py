"""Configs of published models, as far as they matter here, and the data that their layers keep by the models' own
code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "torch_dtype": "bfloat16",
}
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
QWEN_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "M-M*-M-*",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Published:
    """A config as it is published, as far as it matters; layers by kind, and each one's bytes of a token or state."""

    config: dict[str, Any]
    full: tuple[int, int] = (0, 0)
    window: tuple[int, int] = (0, 0)
    window_tokens: int = 0
    state: tuple[int, int] = (0, 0)


def attention(kind: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


def latent(kind: str, layers: int, heads: int, hidden: int) -> dict[str, Any]:
    more = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return attention(kind, layers, heads, heads, hidden, **more)


def inside(kind: str, text: dict[str, Any], *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the text part of a model that sees."""
    return {
        "model_type": kind,
        "torch_dtype": "bfloat16",
        "text_config": {name: value for name, value in text.items() if name not in ("torch_dtype", *leave_out)},
    }


HEADS = ("num_attention_heads", "num_key_value_heads")
NEMOTRON_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
JAMBA_LAYERS = {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
JAMBA_STATES = {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2}
GPT_LAYERS = ["sliding_attention", "full_attention"]

PUBLISHED = {
    "Llama-3.1-8B": Published(attention("llama", 32, 32, 8, 4096), full=(32, 4096)),
    "Llama-3.1-70B": Published(attention("llama", 80, 64, 8, 8192), full=(80, 4096)),
    "Llama-3.2-1B": Published(attention("llama", 16, 32, 8, 2048, head_dim=64), full=(16, 2048)),
    "Llama-4-Scout": Published(
        inside("llama4", attention("llama4_text", 48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192)),
        full=(12, 4096), window=(36, 4096), window_tokens=8192,
    ),
    "Mistral-7B-v0.1": Published(
        attention("mistral", 32, 32, 8, 4096, sliding_window=4096), window=(32, 4096), window_tokens=4096
    ),
    "Mistral-Nemo": Published(
        attention("mistral", 40, 32, 8, 5120, head_dim=128, sliding_window=None), full=(40, 4096)
    ),
    "Mixtral-8x7B": Published(attention("mixtral", 32, 32, 8, 4096, sliding_window=None), full=(32, 4096)),
    "Qwen2.5-7B": Published(
        attention("qwen2", 28, 28, 4, 3584, sliding_window=131072, use_sliding_window=False), full=(28, 2048)
    ),
    "Qwen3-8B": Published(attention("qwen3", 36, 32, 8, 4096, head_dim=128, sliding_window=None), full=(36, 4096)),
    "Qwen3-30B-A3B": Published(attention("qwen3_moe", 48, 32, 4, 2048, head_dim=128), full=(48, 2048)),
    "Qwen3-235B-A22B": Published(attention("qwen3_moe", 94, 64, 4, 4096, head_dim=128), full=(94, 2048)),
    "Qwen3-Next-80B-A3B": Published(
        QWEN_NEXT, full=(12, 2048), state=(36, (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)
    ),
    "DeepSeek-V3": Published(latent("deepseek_v3", 61, 128, 7168), full=(61, 1152)),
    "DeepSeek-V2-Lite": Published(latent("deepseek_v2", 27, 16, 2048), full=(27, 1152)),
    "Kimi-K2": Published(latent("kimi_k2", 61, 64, 7168), full=(61, 1152)),
    "Gemma-2-9B": Published(
        attention("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096, torch_dtype="float32"),
        full=(21, 8192), window=(21, 8192), window_tokens=4096,
    ),
    "Gemma-2-27B": Published(
        attention("gemma2", 46, 32, 16, 4608, head_dim=128, sliding_window=4096, torch_dtype="float32"),
        full=(23, 8192), window=(23, 8192), window_tokens=4096,
    ),
    "Gemma-3-4B": Published(
        inside("gemma3", attention("gemma3_text", 34, 8, 4, 2560, sliding_window=1024), leave_out=HEADS),
        full=(5, 4096), window=(29, 4096), window_tokens=1024,
    ),
    "Gemma-3-27B": Published(
        inside("gemma3", attention("gemma3_text", 62, 32, 16, 5376, head_dim=128, sliding_window=1024)),
        full=(10, 8192), window=(52, 8192), window_tokens=1024,
    ),
    "gpt-oss-20b": Published(
        attention("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=GPT_LAYERS * 12,
                  torch_dtype=None),
        full=(12, 2048), window=(12, 2048), window_tokens=128,
    ),
    "gpt-oss-120b": Published(
        attention("gpt_oss", 36, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=GPT_LAYERS * 18,
                  torch_dtype=None),
        full=(18, 2048), window=(18, 2048), window_tokens=128,
    ),
    "Jamba-v0.1": Published(
        attention("jamba", 32, 32, 8, 4096, **JAMBA_LAYERS, **JAMBA_STATES, sliding_window=None),
        full=(4, 4096), state=(28, 8192 * 3 * 2 + 8192 * 16 * 4),
    ),
    "Nemotron-H-8B": Published(
        attention("nemotron_h", 52, 32, 8, 4096, head_dim=128, hybrid_override_pattern=NEMOTRON_8B,
                  mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4),
        full=(4, 4096), state=(24, (128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    ),
    "GLM-4-9B-0414": Published(attention("glm4", 40, 32, 2, 4096, head_dim=128), full=(40, 1024)),
    "GLM-4.5-Air": Published(attention("glm4_moe", 46, 96, 8, 4096, head_dim=128), full=(46, 4096)),
    "OLMo-2-7B": Published(attention("olmo2", 32, 32, 32, 4096), full=(32, 16384)),
    "Granite-3.1-8B": Published(attention("granite", 40, 32, 8, 4096), full=(40, 4096)),
    "Command-R": Published(attention("cohere", 40, 64, 64, 8192), full=(40, 32768)),
    "Phi-4": Published(attention("phi3", 40, 40, 10, 5120, sliding_window=None), full=(40, 5120)),
}  # fmt: skip
"""States with what vLLM is told as mamba_ssm_cache_dtype=float32."""
ENGINES_ALONE: dict[str, dict[str, Any]] = {
    "Falcon-H1-7B": attention(
        "falcon_h1",
        44,
        12,
        2,
        3072,
        head_dim=128,
        mamba_d_state=256,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_d_ssm=3072,
    ),
    "MiniMax-Text-01": attention("minimax_text_01", 80, 64, 8, 6144, head_dim=128, attn_type_list=([0] * 7 + [1]) * 10),
    "Kimi-Linear-48B": latent("kimi_linear", 27, 32, 2304) | {"linear_attn_config": {"kda_layers": [1, 2, 3]}},
}
"""Only an engine knows what their layers keep."""
