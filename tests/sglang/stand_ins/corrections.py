"""Corrects SGLang's `torch_native` attention on models with windows, for tests alone.

It writes a window layer's keys where the pool of windows has room for them, and reads them at the numbers that the
same tokens have in the other pool. Here both numbers are one for whoever reads: a layer's buffer comes in the order of
the other pool. Without it an engine's own hits differ from its computations, so that there is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

CORRECTS = "sglang.srt.mem_cache.swa_memory_pool"


def correct(module: ModuleType) -> None:
    """Of this name, when it has just been imported."""
    pool = module.SWAKVPool
    for name in ("get_key_buffer", "get_value_buffer"):
        setattr(pool, name, _in_order_of_tokens(getattr(pool, name)))


def _in_order_of_tokens(read: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def read_ordered(pool: Any, layer: int) -> Any:
        rows = read(pool, layer)
        _, has_window = pool.layers_mapping[layer]
        if not has_window:
            return rows
        # A token without a row in this pool is out of every window: whatever stands there is masked.
        return rows[pool.full_to_swa_index_mapping.clamp(min=0).long()]

    return read_ordered
