"""How long does it take to build the page map of a large cache, and does it depend on the number of blocks?"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.limits import Limit
from kvoffload.bench.measure import measure_pair
from kvoffload.kvspec import Allocation, GroupSpec, KVGeometry, attention_layer, build_page_map, place_strided

LAYERS = 128
NUM_BLOCKS = (1_000, 100_000)
BLOCK_SIZE = 16
GOAL_S = 0.05


class PageMapBenchmark:
    """128 attention layers, each with a page size of its own. The limit reads every run once, in plain Python.

    What is timed starts at the engine's numbers: describing and checking the geometry is part of it.
    """

    name = "pagemap"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """One line per number of blocks, in seconds."""
        for num_blocks in NUM_BLOCKS:
            progress(f"{LAYERS} layers, {num_blocks} blocks")
            geometry = make_geometry(num_blocks)
            runs = [(run.base, run.stride, run.length) for placement in geometry.placements for run in placement.runs]
            limit = limit_read_runs(runs)
            pair = measure_pair(lambda count=num_blocks: build_page_map(make_geometry(count)), limit.call)  # type: ignore[misc]
            limit.rate(pair.limit_s)
            yield Result(
                name=self.name,
                value=pair.value_s,
                unit="s",
                limit=pair.limit_s,
                spread=pair.spread,
                goal=Goal(Measure.VALUE, Bound.AT_MOST, GOAL_S),
                params={"layers": LAYERS, "num_blocks": num_blocks, "runs": len(runs)},
            )


def make_geometry(num_blocks: int) -> KVGeometry:
    """Layer-outermost, page sizes that differ from layer to layer."""
    layers = tuple(
        attention_layer(
            f"layers.{index}", block_size=BLOCK_SIZE, num_kv_heads=1 + index % 8, head_size=128, dtype="bfloat16"
        )
        for index in range(LAYERS)
    )
    offset, placements = 0, []
    for layer in layers:
        placements.append(place_strided(layer, allocation="kv", block_stride=layer.page_bytes, offset=offset))
        offset += layer.page_bytes * num_blocks
    return KVGeometry(
        num_blocks=num_blocks,
        hash_block_size=BLOCK_SIZE,
        groups=(GroupSpec(name="attention", layers=layers, block_size=BLOCK_SIZE),),
        allocations=(Allocation(name="kv", size_bytes=offset),),
        placements=tuple(placements),
    )


def limit_read_runs(runs: list[tuple[int, int, int]]) -> Limit:
    """One plain pass over declared runs that adds their lengths: whatever plans them must at least look at each."""
    return Limit("read runs", lambda: sum(length for _, _, length in runs), len(runs), "runs", 1e6)
