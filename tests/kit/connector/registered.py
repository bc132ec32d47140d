"""Tensors as an engine registers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
)

from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.kvspec import KVGeometry, PageMap, Registration, run_self_test
from tests.kit.transfer.plain_copy import PlainCopy

Tensors = dict[str, torch.Tensor]


def describe(
    config: KVCacheConfig, tensors: Tensors, sharing: dict[str, str] | None = None, *, context_ranks: int = 1
) -> KVGeometry:
    assert config.kv_cache_layout is not None
    assert config.hash_block_size is not None
    return describe_cache(
        EngineCache(
            config=config,
            tensors=tensors,
            sharing=sharing or {},
            layout=config.kv_cache_layout,
            hash_block_size=config.hash_block_size,
            context_ranks=context_ranks,
        )
    )


def register(geometry: KVGeometry, tensors: Tensors) -> Registration:
    """Checked, proved, and tested with a pattern in a block of every group."""
    registration = Registration()

    def try_copies(page_map: PageMap, memory: Any) -> None:
        copy = PlainCopy(page_map, memory)

        def save(group: int, block: int) -> torch.Tensor:
            rows = torch.empty((1, page_map.groups[group].record_bytes), dtype=torch.uint8)
            copy.save(group, [block], rows)
            return rows

        stored = [group for group, pages in enumerate(page_map.groups) if pages.record_bytes]
        block = page_map.num_blocks - 1
        run_self_test(
            page_map,
            memory,
            free_blocks=dict.fromkeys(stored, block),
            save=save,
            load=lambda group, block, rows: copy.load(group, [block], rows),
        )

    registration.register(geometry, tensors, self_test=try_copies)
    return registration


def contradict(config: KVCacheConfig, **changes: Any) -> KVCacheConfig:
    first, *others = config.kv_cache_tensors
    return replace(config, kv_cache_tensors=[replace(first, **changes), *others])
