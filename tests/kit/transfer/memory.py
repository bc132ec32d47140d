"""Random memory and records to copy between."""

from __future__ import annotations

import numpy as np
import torch

from kvoffload.kvspec import KVGeometry, PageMap


def random_memory(geometry: KVGeometry, seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    return {
        allocation.name: torch.from_numpy(random.integers(0, 256, allocation.size_bytes, dtype=np.uint8))
        for allocation in geometry.allocations
    }


def new_records(page_map: PageMap, group: int, count: int) -> torch.Tensor:
    return torch.zeros(count, page_map.groups[group].record_bytes, dtype=torch.uint8)
