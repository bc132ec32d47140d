"""Models that draft for the dense one, as vLLM's speculative decoding takes them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.tiny_models import SEED, VOCAB_SIZE

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 256, 4, 2, 64, 512


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
