"""How close do copy engines come to a plain copy of the same bytes, and what does it cost to hand them a plan?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.copied_blocks import LAYERS, finish, make_geometry, scatter_items
from kvoffload.bench.limits import Limit, limit_copy_by_threads
from kvoffload.bench.measure import measure_pair, measure_timed_pair, time_calls
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import KVGeometry, build_page_map
from kvoffload.transfer import CopyDirection, CopyItems, HostEngine

THREADS = 2
PAGE_BYTES = (4 << 10, 64 << 10, 256 << 10)
GOALS = {4 << 10: 0.7, 64 << 10: 0.9, 256 << 10: 0.9}
POOL_BYTES = 512 << 20
"""Far more than any processor's cache. Half of its blocks are copied, from all over it."""
SUBMIT_BLOCKS = 1_000
SUBMIT_PAGE_BYTES = 256
SUBMIT_GOAL_S = 300e-6
INSTALL_TORCH = "pip install torch, or run this in the engine's Python"


class CopyBenchmark:
    """Scattered blocks to and from scattered slots, layer after layer in the engine's memory.

    The limit copies as many bytes between the same two memories, in one piece per thread, by the faster of plain stores
    and stores around the caches. Digests cost what they cost: no goal.
    """

    name = "copy"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """A line per page size, direction, and with or without digests, in bytes per second; then one for `submit`.

        Where torch sees a GPU, its rows follow.
        """
        try:
            import torch
        except ImportError:
            raise BenchmarkError("torch is not installed, with which pages are copied", remedy=INSTALL_TORCH) from None

        for page_bytes in PAGE_BYTES:
            pool = make_pool(page_bytes, POOL_BYTES)
            with HostEngine(build_page_map(pool.geometry), {"kv": pool.pages.ctypes.data}, threads=THREADS) as engine:
                for direction in CopyDirection:
                    with _choose_limit(pool, direction) as limit:
                        for has_digests in (False, True):
                            progress(f"{direction.value} pages of {page_bytes} bytes{', digests' * has_digests}")
                            yield self._measure(pool, engine, direction, has_digests, limit)
        progress(f"handing over {SUBMIT_BLOCKS} blocks")
        yield self._measure_submit()
        if torch.cuda.is_available():
            from kvoffload.bench.copy_gpu import measure_gpu

            yield from measure_gpu(progress)

    def _measure(
        self, pool: Pool, engine: HostEngine, direction: CopyDirection, has_digests: bool, limit: Limit
    ) -> Result:
        def copy() -> None:
            engine.submit(direction, pool.items, has_digests=has_digests)
            finish(engine)

        pair = measure_pair(copy, limit.call)
        ratio = GOALS.get(pool.page_bytes)
        return Result(
            name=self.name,
            value=pool.copied_bytes / pair.value_s,
            unit="B/s",
            limit=limit.rate(pair.limit_s),
            spread=pair.spread,
            goal=None if has_digests or ratio is None else Goal(Measure.RATIO, Bound.AT_LEAST, ratio),
            params={
                "engine": "host",
                "direction": direction.value,
                "page_bytes": pool.page_bytes,
                "layers": LAYERS,
                "threads": THREADS,
                "digests": "yes" if has_digests else "no",
                "limited_by": limit.name,
            },
        )

    def _measure_submit(self) -> Result:
        """The calling thread's time alone. The limit copies the arrays that make the plan."""
        pool = make_pool(SUBMIT_PAGE_BYTES, 2 * SUBMIT_BLOCKS * SUBMIT_PAGE_BYTES * LAYERS)
        items = pool.items
        with HostEngine(build_page_map(pool.geometry), {"kv": pool.pages.ctypes.data}, threads=THREADS) as engine:

            def submit() -> float:
                start = time.perf_counter()
                engine.submit(CopyDirection.LOAD, items)
                seconds = time.perf_counter() - start
                finish(engine)
                return seconds

            def copy_arrays() -> float:
                return time_calls(lambda: (items.group.copy(), items.block.copy(), items.slot.copy()), 100)

            pair = measure_timed_pair(submit, copy_arrays, pairs=101)
        return Result(
            name=self.name,
            value=pair.value_s,
            unit="s",
            limit=pair.limit_s,
            spread=pair.spread,
            goal=Goal(Measure.VALUE, Bound.AT_MOST, SUBMIT_GOAL_S),
            params={"engine": "host", "submit": "load", "blocks": len(items), "layers": LAYERS},
        )


@dataclass(frozen=True)
class Pool:
    """An engine's memory, slots for half of its blocks, and a plan of that half in no order."""

    page_bytes: int
    geometry: KVGeometry
    pages: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint8]
    items: CopyItems

    @property
    def copied_bytes(self) -> int:
        return self.slots.nbytes


def make_pool(page_bytes: int, size_bytes: int) -> Pool:
    """Every byte has been written, so that no page is missing."""
    record_bytes = page_bytes * LAYERS
    num_blocks = size_bytes // record_bytes
    pages = np.full(num_blocks * record_bytes, 1, np.uint8)
    slots = np.full(num_blocks // 2 * record_bytes, 2, np.uint8)
    items = scatter_items(num_blocks, record_bytes, slots.ctypes.data)
    return Pool(page_bytes, make_geometry(page_bytes, num_blocks), pages, slots, items)


@contextmanager
def _choose_limit(pool: Pool, direction: CopyDirection) -> Iterator[Limit]:
    pages, slots = pool.pages[: pool.copied_bytes], pool.slots
    source, target = (pages, slots) if direction is CopyDirection.SAVE else (slots, pages)
    with (
        limit_copy_by_threads(source, target, threads=THREADS, streams=False) as through_caches,
        limit_copy_by_threads(source, target, threads=THREADS, streams=True) as around_caches,
    ):
        yield min(through_caches, around_caches, key=lambda limit: min(time_calls(limit.call, 1) for _ in range(5)))
