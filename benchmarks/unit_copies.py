"""Measures copies of blocks as units of KV heads, which engines of every tensor-parallel size can read.

Blocks of Llama-3.1-8B as an engine of one rank holds them, to and from slots, by the host copy engine with two threads.
The limit copies whole records, as engines do that share with their like alone. Prints one JSON line for each layout.
Run: python -m benchmarks.unit_copies
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from kvoffload.kvspec import (
    LAYOUTS,
    Allocation,
    GroupSpec,
    HeadUnits,
    KVGeometry,
    attention_layer,
    build_page_map,
    place_dims,
)
from kvoffload.transfer import CopyDirection, CopyItems, HostEngine
from tests.kit.kvspec.layouts import layer_dims, layout_dims

LAYERS, HEADS, HEAD_SIZE, TOKENS = 32, 8, 128, 16
BLOCKS, COPIED, THREADS, RUNS = 256, 128, 2, 21
TIMEOUT_S = 120.0


def make_geometry(layout: str, units: HeadUnits | None) -> KVGeometry:
    sizes = {"layer": LAYERS, "block": BLOCKS, "head": HEADS, "token": TOKENS, "content": 2 * HEAD_SIZE}
    dims = layout_dims(LAYOUTS[layout], sizes=sizes, itemsize=2)
    layers = [
        attention_layer(f"{at}", block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
        for at in range(LAYERS)
    ]
    placements = []
    for at, layer in enumerate(layers):
        offset, inner = layer_dims(dims, at)
        placements.append(place_dims(layer, allocation="kv", dims=inner, num_blocks=BLOCKS, offset=offset))
    return KVGeometry(
        num_blocks=BLOCKS,
        hash_block_size=TOKENS,
        groups=(GroupSpec(name="attention", layers=tuple(layers), block_size=TOKENS),),
        allocations=(Allocation(name="kv", size_bytes=LAYERS * BLOCKS * layers[0].page_bytes),),
        placements=tuple(placements),
        layout=layout,
        units=units,
    )


class Copies:
    """An engine over the same pages, with or without units, and a plan of half of its blocks in no order."""

    def __init__(self, layout: str, units: HeadUnits | None, pages: Any, slots: Any) -> None:
        begun_s = time.perf_counter()
        page_map = build_page_map(make_geometry(layout, units))
        self.engine = HostEngine(page_map, {"kv": pages.ctypes.data}, threads=THREADS)
        self.opened_s = time.perf_counter() - begun_s
        records = len(page_map.groups)
        self.runs = sum(group.num_runs for group in page_map.groups)
        self.run_bytes = int(page_map.groups[0].length[0])
        self.blocks = np.random.default_rng(1).permutation(BLOCKS)[:COPIED]
        self.items = CopyItems(
            group=np.tile(np.arange(records), COPIED),
            block=np.repeat(self.blocks, records),
            slot=slots.ctypes.data + np.arange(COPIED * records) * page_map.groups[0].record_bytes,
        )

    def copy(self, direction: CopyDirection, *, has_digests: bool) -> float:
        begun_s = time.perf_counter()
        self.engine.submit(direction, self.items, has_digests=has_digests)
        assert self.engine.fence(TIMEOUT_S)
        (finished,) = self.engine.poll()
        assert not finished.fault, finished.fault
        return time.perf_counter() - begun_s


def measure(layout: str) -> dict[str, object]:
    """Whole records and units alternate, so that the machine's other work is in both. Rates are those of the fastest
    and of the median run."""
    record_bytes = LAYERS * TOKENS * HEADS * 2 * HEAD_SIZE * 2
    pages, slots = np.full(BLOCKS * record_bytes, 1, np.uint8), np.full(COPIED * record_bytes, 2, np.uint8)
    whole, units = (Copies(layout, of, pages, slots) for of in (None, HeadUnits(heads=HEADS)))
    told: dict[str, object] = {"layout": layout}
    for direction in CopyDirection:
        for has_digests in (False, True):
            pairs = [
                (whole.copy(direction, has_digests=has_digests), units.copy(direction, has_digests=has_digests))
                for _ in range(RUNS)
            ]
            for name, seconds in zip(("whole", "units"), zip(*pairs, strict=True), strict=True):
                rates = [round(slots.nbytes / s / 1e9, 2) for s in (min(seconds), statistics.median(seconds))]
                told[f"{direction.value}{' with digests' * has_digests}, {name}, GB/s"] = rates
    for name, one in (("whole", whole), ("units", units)):
        told[f"{name}: runs of a block, bytes of a run, ms to open"] = [one.runs, one.run_bytes, one.opened_s * 1e3]
        one.engine.close()
    return told


def main() -> None:
    for layout in ("LBHNC", "LBNHC"):
        print(json.dumps(measure(layout)), flush=True)


if __name__ == "__main__":
    main()
