"""Tiny random LoRA adapters for the dense model, in the files that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.tiny_models import DENSE

RANK = 8
HIDDEN = 256
HEADS = {"k_proj": 2, "v_proj": 2}
HEAD_SIZE = 64


def write_adapter(folder: Path, *, seed: int) -> Path:
    """One that changes keys and values, and with them every answer. Overwrites what lies there."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(len(DENSE.layer_kinds)):
        for module, heads in HEADS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, HIDDEN, generator=random)
            weights[f"{name}.lora_B.weight"] = 0.1 * torch.randn(heads * HEAD_SIZE, RANK, generator=random)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": list(HEADS)}))
    return folder
