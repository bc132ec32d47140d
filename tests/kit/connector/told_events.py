"""What events are told of as, and what was made of what was heard."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.connector.engine.events import CacheEvents


def told(name: bytes) -> Any:
    """A hash as vLLM's events say it."""
    return maybe_convert_block_hash(BlockHash(name))


def take(events: CacheEvents) -> list[Any]:
    events.make()
    return list(events.take())
