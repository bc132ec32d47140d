"""Tiny random models for the real SGLang engine: one kind of KV pool each."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from kvoffload.engines.weight_sample import pick_positions
from tests.vllm.tiny_models import MLA_POSITIONS, VOCAB_SIZE, save_tokenizer

INIT_STD = 0.2
"""Wide, so that attention matters and wrong bytes show in the tokens."""


EMBEDDING = "model.embed_tokens.weight"


def change_token(model: Path, folder: Path, token: int) -> Path:
    """The same model, but for some elements of one row of one parameter, of which a sample has none."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors[EMBEDDING]
    sampled = set((pick_positions(embedding.numel()) - token * embedding.shape[1]).tolist())
    for at in range(embedding.shape[1]):
        if at not in sampled and at % 8:
            embedding[token, at] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_mha(folder: Path, seed: int) -> None:
    """Llama with two heads of keys and values: one buffer of keys and one of values a layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**_shape(), num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def build_mha_text(folder: Path, seed: int) -> None:
    """The same with a tokenizer, and a template for chats."""
    build_mha(folder, seed)
    save_tokenizer(folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["chat_template"] = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def build_mla(folder: Path, seed: int) -> None:
    """DeepSeek-V2 without experts: one latent a token."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV2Config(
        **_shape(),
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,
        moe_layer_freq=1,
        moe_intermediate_size=64,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        rope_parameters=dict(MLA_POSITIONS),
    )
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


SWA_WINDOW = 64


def build_swa(folder: Path, seed: int) -> None:
    """Gemma 4, text alone: layers with a window and layers without one, in pools of their own."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(seed)
    config = Gemma4TextConfig(
        **_shape(),
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=32,
        num_global_key_value_heads=2,
        sliding_window=SWA_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        pad_token_id=0,
        attention_k_eq_v=False,
        # SGLang asks for it by this name.
        swa_num_key_value_heads=2,
    )
    Gemma4ForCausalLM(config).save_pretrained(folder)


def build_gdn(folder: Path, seed: int) -> None:
    """Qwen3-Next: three gated delta nets, whose state is a slot of its own pool, to one layer of attention."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        **_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        # SGLang asks for it by this name.
        full_attention_interval=4,
    )
    Qwen3NextForCausalLM(config).save_pretrained(folder)


def build_mamba2(folder: Path, seed: int) -> None:
    """Granite 4: three state spaces to one layer of attention."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(seed)
    config = GraniteMoeHybridConfig(
        **_shape(),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba"] * 3 + ["attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        attention_multiplier=32**-0.5,
        position_embedding_type="nope",
    )
    GraniteMoeHybridForCausalLM(config).save_pretrained(folder)


def build_sparse_states(folder: Path, seed: int) -> None:
    """Nemotron-H: between state spaces and attention layers that keep nothing."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(seed)
    config = NemotronHConfig(
        **_shape(),
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=8,
        chunk_size=64,
    )
    NemotronHForCausalLM(config).save_pretrained(folder)
    # SGLang reads their former names.
    told = json.loads((folder / "config.json").read_text())
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    for key in ("layers_block_type", "mtp_layers_block_type"):
        told[key] = [names.get(name, name) for name in told[key]]
    (folder / "config.json").write_text(json.dumps(told))


def build_adapter(folder: Path, seed: int) -> None:
    """LoRA of `build_mha`: what queries and values are made of, strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, 128)), ("B", (size, 8))):
                numbers = torch.randn(shape, generator=random) * INIT_STD
                tensors[f"{prefix}.lora_{part}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _shape() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
    }


BUILDERS = {
    "mha": build_mha,
    "mha_text": build_mha_text,
    "mla": build_mla,
    "swa": build_swa,
    "gdn": build_gdn,
    "mamba2": build_mamba2,
    "sparse_states": build_sparse_states,
    "adapter": build_adapter,
}

if __name__ == "__main__":
    BUILDERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
