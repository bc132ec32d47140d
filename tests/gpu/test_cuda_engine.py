"""The engine for GPUs on the real driver: each byte as the host engine has it, whatever way, layout and page size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from kvoffload.kvspec import LAYOUTS, PageMap, Registration, build_page_map
from kvoffload.transfer import CopyDirection, CopyItems, HostEngine
from kvoffload.transfer.calibration import BUDGET_S, find_calibration, page_sizes
from kvoffload.transfer.copy_engine import NativeCopyEngine
from kvoffload.transfer.copy_ways import NO_LIMIT, CopyWay, WayRule
from kvoffload.transfer.cuda_engine import CudaEngine
from tests.kit.kvspec.builders import allocate
from tests.kit.transfer.gpu_copies import CASES, make_geometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch finds no CUDA device"),
]

TIMEOUT_S = 60.0
PATTERNS = 40


def always(way: CopyWay) -> tuple[WayRule, ...]:
    return tuple(WayRule(direction=d, run_bytes=NO_LIMIT, runs=NO_LIMIT, way=way) for d in CopyDirection)


def all_items(page_map: PageMap, group: int, slots: torch.Tensor) -> CopyItems:
    """Every block that may be copied, backwards, each with its record in the row of slots."""
    blocks = np.array([b for b in range(page_map.num_blocks) if b != page_map.null_block][::-1], np.int64)
    record_bytes = np.uint64(page_map.groups[group].record_bytes)
    return CopyItems(
        group=np.full(len(blocks), group), block=blocks, slot=slots.data_ptr() + blocks.astype(np.uint64) * record_bytes
    )


def run(engine: NativeCopyEngine, direction: CopyDirection, items: CopyItems, **settings: int) -> None:
    engine.submit(direction, items, has_digests=True, **settings)
    assert engine.fence(TIMEOUT_S)
    assert [finished.fault for finished in engine.poll()] == [""]


def make_slots(page_map: PageMap, group: int) -> torch.Tensor:
    return torch.zeros(page_map.num_blocks * page_map.groups[group].record_bytes, dtype=torch.uint8)


def wait_for_registration(engine: CudaEngine) -> None:
    wait_for(lambda: engine.registration.is_done)
    assert engine.registration.problem == ""


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("way", CopyWay)
@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_the_host_engines(case: str, way: CopyWay, is_registered: bool) -> None:
    geometry = make_geometry(case)
    tensors = {"cpu": allocate(geometry), "cuda": allocate(geometry, "cuda")}
    memory: dict[str, Mapping[str, torch.Tensor]] = {}
    for device, made in tensors.items():
        registration = Registration()
        registration.register(geometry, made.views, scale_views=made.scales)
        memory[device] = dict(registration.memory)
    for name, flat in memory["cpu"].items():
        flat.random_(0, 256)
        memory["cuda"][name].copy_(flat)
    torch.cuda.synchronize()
    page_map = build_page_map(geometry)
    with HostEngine(page_map, memory["cpu"]) as host, CudaEngine(page_map, memory["cuda"]) as device:
        device.set_ways(always(way))
        for group, pages in enumerate(page_map.groups):
            if pages.record_bytes == 0:
                continue
            expected, saved = make_slots(page_map, group), make_slots(page_map, group)
            if is_registered:
                device.add_host_range(saved.data_ptr(), saved.numel())
                wait_for_registration(device)
            run(host, CopyDirection.SAVE, all_items(page_map, group, expected))
            run(device, CopyDirection.SAVE, all_items(page_map, group, saved))
            assert torch.equal(saved, expected)
            # Other bytes, or a load that does nothing would pass.
            saved ^= 0xFF
            expected ^= 0xFF
            run(host, CopyDirection.LOAD, all_items(page_map, group, expected))
            run(device, CopyDirection.LOAD, all_items(page_map, group, saved))
            if is_registered:
                device.remove_host_range(saved.data_ptr(), saved.numel())
                wait_for(lambda: not device.registration.is_leaving)
        for name, flat in memory["cpu"].items():
            assert torch.equal(memory["cuda"][name].cpu(), flat)


def small() -> tuple[PageMap, dict[str, torch.Tensor]]:
    page_map = build_page_map(make_geometry(f"{next(iter(LAYOUTS))}-64"))
    return page_map, {a.name: torch.zeros(a.size_bytes, dtype=torch.uint8, device="cuda") for a in page_map.allocations}


@pytest.mark.parametrize("way", CopyWay)
def test_copies_and_the_models_stream_keep_their_order(way: CopyWay) -> None:
    page_map, memory = small()
    stream = torch.cuda.Stream()
    slots = make_slots(page_map, 0)
    busy = torch.randn(4096, 4096, device="cuda")
    with CudaEngine(page_map, memory) as engine:
        engine.set_ways(always(way))
        engine.add_host_range(slots.data_ptr(), slots.numel())
        items = all_items(page_map, 0, slots)
        for pattern in range(1, PATTERNS):
            with torch.cuda.stream(stream):
                torch.mm(busy, busy)
                for flat in memory.values():
                    flat.fill_(pattern)
            ticket = engine.submit(CopyDirection.SAVE, items, after=stream.cuda_stream)
            engine.make_wait(stream.cuda_stream, ticket, TIMEOUT_S)
            with torch.cuda.stream(stream):
                for flat in memory.values():
                    flat.fill_(0)
            assert engine.fence(TIMEOUT_S)
            assert [finished.fault for finished in engine.poll()] == [""]
            saved = slots.view(page_map.num_blocks, -1)[items.block]
            assert bool((saved == pattern).all())


def test_a_graph_can_be_captured_beside_it() -> None:
    page_map, memory = small()
    slots = make_slots(page_map, 0)
    big = torch.zeros(512 << 20, dtype=torch.uint8)
    counter = torch.zeros(1, device="cuda")
    with CudaEngine(page_map, memory) as engine:
        items = all_items(page_map, 0, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            engine.add_host_range(big.data_ptr(), big.numel())
            for _ in range(20):
                engine.submit(CopyDirection.SAVE, items)
                counter.add_(1)
                assert engine.fence(TIMEOUT_S)
        assert [finished.fault for finished in engine.poll()] == [""] * 20
        wait_for_registration(engine)
        graph.replay()
        torch.cuda.synchronize()
        assert counter.item() == 20


def test_calibration_keeps_to_its_budget_and_is_kept(tmp_path: object) -> None:
    page_map, _ = small()
    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    first = find_calibration(page_sizes(page_map), 0, tmp_path)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    assert first.timings
    assert find_calibration(page_sizes(page_map), 0, tmp_path) == first  # type: ignore[arg-type]
    print(f"calibration took {seconds:.2f} s, its budget is {BUDGET_S} s of copies")
