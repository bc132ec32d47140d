"""Models that draft, as vLLM's speculative decoding takes them: one for the dense model, one for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.tiny_models import (
    INIT_STD,
    MAX_POSITIONS,
    MLA_POSITIONS,
    SEED,
    VOCAB_SIZE,
    GroupShape,
    TinyModel,
    save_random_weights,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 256, 4, 2, 64, 512
LAYERS, MLA_LAYERS = 4, 3
ADDED = 0.002
"""How much of what a layer of random weights adds is left in the model that drafts for itself."""


def build_eagle3(folder: Path) -> None:
    """One layer over hidden states of three of the model's layers, with random weights."""
    import torch
    from safetensors.torch import save_file

    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (VOCAB_SIZE, HIDDEN),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        f"{name}.weight": (0.1 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        for name, shape in shapes.items()
    } | {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))


def _shared_shape() -> dict[str, Any]:
    """All models that draft for themselves have these."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
    }


def build_mtp(folder: Path) -> None:
    """MiMo: Qwen2 with one more layer that predicts the token after the next (MTP), in the same checkpoint.

    Layers add little to a token's embedding, in which the two agree: so some drafts are right, and some not.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **_shared_shape(),
        num_hidden_layers=LAYERS + 1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    save_random_weights(folder, config, Qwen2ForCausalLM)
    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= ADDED
    layer, drafting = f"model.layers.{LAYERS}.", "model.mtp_layers.0."
    weights = {name.replace(layer, drafting): weight for name, weight in weights.items()}
    ones, unchanged = torch.ones(HIDDEN, dtype=torch.bfloat16), torch.eye(HIDDEN, dtype=torch.bfloat16)
    weights |= {f"{drafting}{name}_layernorm.weight": ones.clone() for name in ("token", "hidden", "final")}
    weights[f"{drafting}input_proj.weight"] = torch.cat([ADDED * unchanged, INIT_STD * unchanged], dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings |= {
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": LAYERS,
        "layer_types": settings["layer_types"][:LAYERS],
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(settings))


_PAGE = 128 * 2 * KV_HEADS * HEAD_DIM * 2
MTP = TinyModel(
    name="mtp",
    build=build_mtp,
    groups=(GroupShape("FullAttentionSpec", tuple(range(LAYERS + 1)), 128, _PAGE, _PAGE),),
    hash_block_size=128,
    layout="LBHNC",
    engine_args={"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}},
)
"""Its last layer is the one that drafts."""


def build_mtp_latents(folder: Path) -> None:
    """DeepSeek-V3: latents, experts, and a last layer that predicts the token after the next."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_shared_shape(),
        num_hidden_layers=MLA_LAYERS + 1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        rope_parameters=dict(MLA_POSITIONS),
    )
    save_random_weights(folder, config, DeepseekV3ForCausalLM)
    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layer, ones = f"model.layers.{MLA_LAYERS}.", torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights |= {f"{layer}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{layer}eh_proj.weight"] = INIT_STD * torch.eye(HIDDEN, dtype=torch.bfloat16).repeat(1, 2)
    weights[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings |= {"num_hidden_layers": MLA_LAYERS, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc"}
    (folder / "config.json").write_text(json.dumps(settings))


def build_mtp_windows(folder: Path) -> None:
    """K-EXAONE: windows and full attention, experts, and a last layer with a window that predicts one token more."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM

    config = ExaoneMoeConfig(
        **_shared_shape(),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=128,
        sliding_window_pattern="LLLG",
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        first_k_dense_replace=1,
        num_experts=4,
        num_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
    )
    save_random_weights(folder, config, ExaoneMoeForCausalLM)
    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    first, drafting = "model.layers.0.", "mtp.layers.0."
    layer = {name.replace(first, drafting): weight for name, weight in weights.items() if name.startswith(first)}
    weights |= {name: weight.clone() for name, weight in layer.items()}
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights |= {f"mtp.{name}.weight": ones.clone() for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    weights["mtp.fc.weight"] = INIT_STD * torch.eye(HIDDEN, dtype=torch.bfloat16).repeat(1, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(settings))


_LATENTS = 16 * (512 + 64) * 2
MTP_LATENTS = TinyModel(
    name="mtp-latents",
    build=build_mtp_latents,
    groups=(GroupShape("MLAAttentionSpec", tuple(range(MLA_LAYERS + 1)), 16, _LATENTS, _LATENTS),),
    hash_block_size=16,
    layout="LBNHC",
    engine_args={**MTP.engine_args, "attention_backend": "CPU_MLA"},
    has_local_prefix_cache=False,
)
MTP_WINDOWS = TinyModel(
    name="mtp-windows",
    build=build_mtp_windows,
    groups=(
        *(GroupShape("SlidingWindowSpec", (layer,), 128, _PAGE, _PAGE) for layer in (0, 1, 2, 0)),
        GroupShape("FullAttentionSpec", (LAYERS - 1,), 128, _PAGE, _PAGE),
    ),
    hash_block_size=128,
    layout="LBHNC",
    engine_args=MTP.engine_args,
)
"""The layer that drafts has the name of the first one in another part of the model, and a group of its own."""
