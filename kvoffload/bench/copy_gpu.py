"""The GPU's rows of the copy benchmark: how close copies come to the link's speed, and how much they slow down a
model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.copied_blocks import LAYERS, finish, make_geometry, scatter_items
from kvoffload.bench.limits import Limit
from kvoffload.bench.measure import Pair, measure_pair, measure_timed_pair
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import build_page_map
from kvoffload.native import memory_headroom_bytes
from kvoffload.transfer.calibration import find_ways
from kvoffload.transfer.copy_engine import CopyDirection, CopyItems
from kvoffload.transfer.copy_ways import NO_LIMIT, CopyWay, WayRule, WayTable
from kvoffload.transfer.cuda_engine import CudaEngine
from kvoffload.units import GIB, KIB, MIB

DEVICE = 0
LARGE_PAGE = 64 * KIB
PAGE_BYTES = (4 * KIB, 8 * KIB, 16 * KIB, LARGE_PAGE, 256 * KIB)
POOL_BYTES = 1 * GIB
"""Half of its blocks are copied."""
SUBMIT_BLOCKS = 1_000
SUBMIT_GOAL_S = 300e-6
MATRIX_SIZE = 8192
MATRIX_PRODUCTS = 60
SLOWDOWN_GOALS = {CopyWay.BATCH: 1.03, CopyWay.STAGED: 1.03, CopyWay.MAPPED: 1.10}
REGISTERED_BYTES = 32 * GIB
REGISTRATION_TIMEOUT_S = 120.0
LAUNCH_GOAL_S = 5e-3
"""A launch may take so long, once, while memory is registered."""


class GpuPool:
    """Pages on the GPU, registered slots for half of the blocks, and a plan of that half in no order."""

    def __init__(self, page_bytes: int, size_bytes: int = POOL_BYTES) -> None:
        num_blocks = size_bytes // (page_bytes * LAYERS)
        self.page_bytes = page_bytes
        self.pages = torch.zeros(num_blocks * page_bytes * LAYERS, dtype=torch.uint8, device="cuda")
        self.slots = np.full(num_blocks // 2 * page_bytes * LAYERS, 2, np.uint8)
        self.items = scatter_items(num_blocks, page_bytes * LAYERS, self.slots.ctypes.data)
        self.page_map = build_page_map(make_geometry(page_bytes, num_blocks))

    def open(self, table: WayTable | None = None) -> CudaEngine:
        """With the ways of a calibration, or with these. All slots are registered."""
        engine = CudaEngine(self.page_map, {"kv": self.pages})
        if chosen := table or find_ways(self.page_map, DEVICE):
            engine.set_ways(chosen)
        engine.add_host_range(self.slots.ctypes.data, self.slots.nbytes)
        _wait_for_registration(engine)
        return engine


class PlainCopies:
    """One pinned copy a direction of as many bytes: what the link gives."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._on_gpu = {d: torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for d in CopyDirection}
        self._on_host = {d: torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True) for d in CopyDirection}
        self._streams = {direction: torch.cuda.Stream() for direction in CopyDirection}

    def run(self, *directions: CopyDirection) -> None:
        for direction in directions:
            with torch.cuda.stream(self._streams[direction]):
                if direction is CopyDirection.SAVE:
                    self._on_host[direction].copy_(self._on_gpu[direction], non_blocking=True)
                else:
                    self._on_gpu[direction].copy_(self._on_host[direction], non_blocking=True)
        for direction in directions:
            self._streams[direction].synchronize()

    def limit(self, *directions: CopyDirection) -> Limit:
        size_bytes = self.size_bytes * len(directions)
        name = "pinned copy" if len(directions) == 1 else "opposed pinned copies"
        return Limit(name, lambda: self.run(*directions), size_bytes, "B", 1e9)


def measure_gpu(progress: Progress) -> Iterator[Result]:
    """All rows of the one GPU that is number 0."""
    for page_bytes in PAGE_BYTES:
        pool = GpuPool(page_bytes)
        plain = PlainCopies(pool.slots.nbytes)
        with pool.open() as engine:
            for direction in CopyDirection:
                progress(f"GPU {direction.value} pages of {page_bytes} bytes")
                yield _measure_link(pool, engine, plain, direction)
            progress(f"GPU both ways, pages of {page_bytes} bytes")
            yield _measure_both(pool, engine, plain)
        del pool, plain
        torch.cuda.empty_cache()
    progress(f"GPU handing over {SUBMIT_BLOCKS} blocks")
    yield _measure_submit()
    for way in CopyWay:
        progress(f"GPU matrix products beside loads, {way.value}")
        yield _measure_slowdown(way)
    progress("GPU launches while memory is registered")
    yield _measure_registration()


def _measure_link(pool: GpuPool, engine: CudaEngine, plain: PlainCopies, direction: CopyDirection) -> Result:
    def copy() -> None:
        engine.submit(direction, pool.items)
        finish(engine)

    limit = plain.limit(direction)
    pair = measure_pair(copy, limit.call)
    goal = 0.95 if pool.page_bytes >= LARGE_PAGE else 0.85
    return _row(pool, pair, limit, Goal(Measure.RATIO, Bound.AT_LEAST, goal), direction.value)


def _measure_both(pool: GpuPool, engine: CudaEngine, plain: PlainCopies) -> Result:
    """Half of the blocks are saved while the other half is loaded."""
    half = len(pool.items) // 2
    parts = [
        CopyItems(group=pool.items.group[part], block=pool.items.block[part], slot=pool.items.slot[part])
        for part in (slice(0, half), slice(half, 2 * half))
    ]
    halves = PlainCopies(half * pool.page_bytes * LAYERS)

    def copy() -> None:
        for direction, items in zip(CopyDirection, parts, strict=True):
            engine.submit(direction, items)
        finish(engine)

    limit = halves.limit(*CopyDirection)
    pair = measure_pair(copy, limit.call)
    return _row(pool, pair, limit, Goal(Measure.RATIO, Bound.AT_LEAST, 0.9), "both")


def _row(pool: GpuPool, pair: Pair, limit: Limit, goal: Goal, direction: str) -> Result:
    return Result(
        name="copy",
        value=limit.amount / pair.value_s,
        unit="B/s",
        limit=limit.rate(pair.limit_s),
        spread=pair.spread,
        goal=goal,
        params={
            "engine": "cuda",
            "direction": direction,
            "page_bytes": pool.page_bytes,
            "layers": LAYERS,
            "limited_by": limit.name,
        },
    )


def _measure_submit() -> Result:
    """The calling thread's time alone, with a compute stream to wait for. The limit records an event."""
    pool = GpuPool(4 * KIB, 2 * SUBMIT_BLOCKS * 4 * KIB * LAYERS)
    stream = torch.cuda.current_stream()
    event = torch.cuda.Event()
    with pool.open() as engine:

        def submit() -> float:
            start = time.perf_counter()
            engine.submit(CopyDirection.LOAD, pool.items, after=stream.cuda_stream)
            seconds = time.perf_counter() - start
            finish(engine)
            return seconds

        def record() -> float:
            start = time.perf_counter()
            event.record(stream)
            return time.perf_counter() - start

        pair = measure_timed_pair(submit, record, pairs=101)
    return Result(
        name="copy",
        value=pair.value_s,
        unit="s",
        limit=pair.limit_s,
        spread=pair.spread,
        goal=Goal(Measure.VALUE, Bound.AT_MOST, SUBMIT_GOAL_S),
        params={"engine": "cuda", "submit": "load", "blocks": len(pool.items), "layers": LAYERS},
    )


def _measure_slowdown(way: CopyWay) -> Result:
    """Seconds of matrix products while loads run without an end, over those without loads. Pages of 16 KiB."""
    pool = GpuPool(16 * KIB)
    table = tuple(WayRule(direction=d, run_bytes=NO_LIMIT, runs=NO_LIMIT, way=way) for d in CopyDirection)
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def multiply() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(MATRIX_PRODUCTS):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    with pool.open(table) as engine:

        def multiply_beside_loads() -> float:
            with Background(lambda: _load(engine, pool.items)):
                return multiply()

        pair = measure_timed_pair(multiply_beside_loads, multiply)
    return Result(
        name="copy",
        value=pair.value_s,
        unit="s",
        limit=pair.limit_s,
        spread=pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, SLOWDOWN_GOALS[way]),
        params={"engine": "cuda", "beside": f"{MATRIX_PRODUCTS} products of {MATRIX_SIZE}", "way": way.value},
    )


def _measure_registration() -> Result:
    """The worst time from launching a small kernel to its end, while memory is registered and while none is."""
    size_bytes = min(REGISTERED_BYTES, memory_headroom_bytes() // 2 // MIB * MIB)
    memory = np.full(size_bytes, 1, np.uint8)
    pool = GpuPool(4 * KIB, 64 * MIB)
    launches: dict[bool, list[float]] = {True: [], False: []}
    with CudaEngine(pool.page_map, {"kv": pool.pages}) as engine:
        small = torch.zeros(1, device="cuda")
        for is_registering in (False, True):
            start = time.perf_counter()
            if is_registering:
                engine.add_host_range(memory.ctypes.data, memory.nbytes)
            while time.perf_counter() - start < 2 or not engine.registration.is_done:
                launched = time.perf_counter()
                small.add_(1)
                torch.cuda.synchronize()
                launches[is_registering].append(time.perf_counter() - launched)
                if launched - start > REGISTRATION_TIMEOUT_S:
                    raise BenchmarkError(f"{size_bytes} bytes were not registered", remedy="give the machine memory")
        seconds = time.perf_counter() - start
        problem = engine.registration.problem
    return Result(
        name="copy",
        value=max(launches[True]),
        unit="s",
        limit=max(launches[False]),
        spread=0.0,
        goal=Goal(Measure.VALUE, Bound.AT_MOST, LAUNCH_GOAL_S),
        params={
            "engine": "cuda",
            "registered_bytes": size_bytes,
            "registration_s": round(seconds, 2),
            "median_launch_s": float(np.median(launches[True])),
            "problem": problem or "none",
        },
    )


def _load(engine: CudaEngine, items: CopyItems) -> None:
    engine.submit(CopyDirection.LOAD, items)
    finish(engine)


@dataclass
class Background:
    """Repeats a call on a thread of its own, beginning before the block does."""

    call: Callable[[], None]

    def __enter__(self) -> None:
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._has_begun.wait()

    def __exit__(self, *fault: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_begun.set()
            self.call()


def _wait_for_registration(engine: CudaEngine) -> None:
    engine.wait_registered(engine.registration.asked_bytes, REGISTRATION_TIMEOUT_S)
    if not engine.registration.is_done:
        raise BenchmarkError("slots were not registered in time", remedy="run on an idle machine")
    if engine.registration.problem:
        raise BenchmarkError(f"slots were not registered: {engine.registration.problem}", remedy="")
