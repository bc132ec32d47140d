"""When a block that is worth saving is saved."""

from __future__ import annotations

from typing import Literal

SavePolicy = Literal["auto", "eager", "on_evict", "second_use"]
SEEN_PER_BLOCK = 8
"""Blocks that `second_use` remembers to have seen, for each that the engine has room for."""


def choose_policy(wish: SavePolicy, *, pool_bytes: int, engine_bytes: int, has_prefix_cache: bool) -> SavePolicy:
    """What `auto` means here: a pool that is smaller than the engine's own cache would only repeat it, unless it takes
    what the engine loses. An engine that caches nothing itself has nothing to lose: its blocks are saved at once."""
    if not has_prefix_cache:
        return "second_use" if wish == "second_use" else "eager"
    if wish != "auto":
        return wish
    return "on_evict" if 0 < pool_bytes < engine_bytes else "eager"
