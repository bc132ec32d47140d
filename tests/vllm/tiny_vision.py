"""A tiny model that sees images: PaddleOCR-VL, whose tokens have three positions each (M-RoPE), as those of Qwen2-VL.

Its processor of images needs Pillow alone. Those of the Qwen and Gemma models need torchvision.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.vllm.tiny_models import (
    DENSE,
    INIT_STD,
    TOKENIZER_TEXT,
    VOCAB_SIZE,
    TinyModel,
    build_tokenizer,
    save_random_weights,
    shared_shape,
)

Pixels = npt.NDArray[np.uint8]
"""Rows of pixels, each of three colours."""
IMAGE = VOCAB_SIZE
"""The token that stands for an image in a prompt. The engine puts one for each part of the image in its place."""
PART = 28
"""Width and height in pixels of the part of an image that becomes one token."""
MAX_PARTS = 256


def build_vision(folder: Path) -> None:
    """Four layers of full attention behind a tower of two layers."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    text = {
        **shared_shape(),
        "vocab_size": VOCAB_SIZE + 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
    }
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 4 * PART // 2,
        "patch_size": PART // 2,
        "initializer_range": INIT_STD,
    }
    config = PaddleOCRVLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=IMAGE + 1, tie_word_embeddings=False
    )
    save_random_weights(folder, config, PaddleOCRVLForConditionalGeneration)
    tokenizer = build_tokenizer(TOKENIZER_TEXT, image_token="<image>")
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    sizes = {"shortest_edge": PART**2, "longest_edge": MAX_PARTS * PART**2}
    PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(size=sizes), tokenizer).save_pretrained(folder)


def make_image(seed: int, *, columns: int = 8, rows: int = 6) -> Pixels:
    """Makes an image of noise, the same for the same seed, that becomes `columns` times `rows` tokens."""
    return np.random.default_rng(seed).integers(256, size=(rows * PART, columns * PART, 3), dtype=np.uint8)


def count_parts(image: Pixels) -> int:
    """Returns how many tokens an image becomes."""
    height, width, _ = image.shape
    return int(height * width // PART**2)


VISION = TinyModel(
    name="vision",
    build=build_vision,
    groups=DENSE.groups,
    hash_block_size=DENSE.hash_block_size,
    layout=DENSE.layout,
    engine_args={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}},
)
