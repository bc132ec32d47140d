"""Changes of an engine's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVQuantMode

Change = Callable[[Any], None]


FP8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}


def set_in(part: str, **values: Any) -> Change:
    return lambda config: vars(getattr(config, part)).update(values)
