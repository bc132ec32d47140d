"""Copy benchmarks, on hosts and on GPUs, copy the blocks of a deep model in no order, and wait for the end here."""

from __future__ import annotations

import numpy as np

from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import Allocation, GroupSpec, KVGeometry, attention_layer, place_strided
from kvoffload.transfer import CopyEngine, CopyItems

LAYERS = 61
TIMEOUT_S = 120.0


def scatter_items(num_blocks: int, record_bytes: int, slots: int) -> CopyItems:
    """Half of the blocks, and as many slots in a row from this address, each in no order."""
    random = np.random.default_rng(3)
    block = random.permutation(num_blocks)[: num_blocks // 2]
    order = random.permutation(len(block)).astype(np.uint64)
    return CopyItems(group=np.zeros(len(block), np.uint32), block=block, slot=slots + order * np.uint64(record_bytes))


def make_geometry(page_bytes: int, num_blocks: int) -> KVGeometry:
    """One group of equal layers, one behind the other in one allocation."""
    layers = tuple(
        attention_layer(f"layers.{index}", block_size=1, num_kv_heads=1, head_size=page_bytes // 4, dtype="bfloat16")
        for index in range(LAYERS)
    )
    placements = tuple(
        place_strided(layer, allocation="kv", block_stride=page_bytes, offset=index * page_bytes * num_blocks)
        for index, layer in enumerate(layers)
    )
    return KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=1,
        groups=(GroupSpec(name="attention", layers=layers, block_size=1),),
        allocations=(Allocation(name="kv", size_bytes=LAYERS * num_blocks * page_bytes),),
        placements=placements,
    )


def finish(engine: CopyEngine) -> None:
    """Waits for all that was submitted, which has to end well."""
    if not engine.fence(TIMEOUT_S):
        raise BenchmarkError(f"a copy did not end within {TIMEOUT_S:.0f} s", remedy="run on an idle machine")
    for finished in engine.poll():
        if finished.fault:
            raise BenchmarkError(f"a copy failed: {finished.fault}", remedy="")
