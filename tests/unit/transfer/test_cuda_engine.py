"""The engine for GPUs, from Python, on the driver made for tests: what native tests show, seen through the binding."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload import native
from kvoffload.errors import BlockCountError, NativeError, StorageError, UnsupportedError
from kvoffload.kvspec import PageMap, build_page_map
from kvoffload.transfer.copy_engine import CopyDirection, CopyItems, FinishedCopy
from kvoffload.transfer.copy_ways import NO_LIMIT, CopyWay, WayRule
from kvoffload.transfer.cuda_engine import CudaEngine, find_device
from tests.kit.kvspec.builders import dense
from tests.kit.transfer.fake_cuda import FakeCuda, needs_fake_cuda

pytestmark = needs_fake_cuda

TIMEOUT_S = 60.0
PAGE_BYTES = mmap.PAGESIZE


class Scene:
    """Three layers in device memory, and slots on whole pages of the host."""

    def __init__(self, *, plan_limit: int = 16) -> None:
        self.driver = FakeCuda()
        self.page_map: PageMap = build_page_map(dense(num_layers=3, num_blocks=8))
        self.memory = {a.name: self.driver.allocate(a.size_bytes) for a in self.page_map.allocations}
        self.record_bytes = self.page_map.groups[0].record_bytes
        self.slots = mmap.mmap(-1, max(8 * self.record_bytes, 4 * PAGE_BYTES))
        self.address = np.frombuffer(self.slots, np.uint8).ctypes.data
        self.engine = CudaEngine(
            self.page_map, self.memory, device=0, plan_limit=plan_limit, library=self.driver.library
        )

    def items(self, blocks: list[int]) -> CopyItems:
        block = np.array(blocks, np.int64)
        return CopyItems(
            group=np.zeros(len(blocks), np.int64),
            block=block,
            slot=self.address + block.astype(np.uint64) * np.uint64(self.record_bytes),
        )

    def run(self, direction: CopyDirection, blocks: list[int], *, has_digests: bool = False) -> FinishedCopy:
        ticket = self.engine.submit(direction, self.items(blocks), has_digests=has_digests)
        assert self.engine.fence(TIMEOUT_S)
        (finished,) = self.engine.poll()
        assert finished.ticket == ticket
        return finished

    def record(self, block: int) -> bytes:
        return bytes(self.slots[block * self.record_bytes : (block + 1) * self.record_bytes])

    def read_block(self, block: int) -> bytes:
        """Reads a block as the device has it, run by run."""
        runs = self.page_map.block_runs(0, block)
        return b"".join(self.driver.read(self.memory[run.allocation] + run.start, run.length) for run in runs)

    def write_block(self, block: int, record: bytes) -> None:
        for run in self.page_map.block_runs(0, block):
            part = record[run.record_offset : run.record_offset + run.length]
            self.driver.write(self.memory[run.allocation] + run.start, part)


def wait_for_registration(scene: Scene) -> None:
    scene.engine.wait_registered(1 << 60, TIMEOUT_S)
    assert scene.engine.registration.is_done


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.engine.close(TIMEOUT_S)
    assert scene.driver.report_count == 0


@pytest.mark.parametrize("way", CopyWay)
def test_blocks_go_to_slots_and_back(scene: Scene, way: CopyWay) -> None:
    scene.engine.set_ways(
        tuple(WayRule(direction=d, run_bytes=NO_LIMIT, runs=NO_LIMIT, way=way) for d in CopyDirection)
    )
    scene.engine.add_host_range(scene.address, PAGE_BYTES)
    random = np.random.default_rng(2)
    records = {block: random.bytes(scene.record_bytes) for block in (1, 2, 5)}
    for block, record in records.items():
        scene.write_block(block, record)
    saved = scene.run(CopyDirection.SAVE, [5, 1, 2], has_digests=True)
    assert saved.fault == ""
    assert saved.digests is not None
    for row, block in zip(saved.digests, (5, 1, 2), strict=True):
        assert scene.record(block) == records[block]
        assert int(row[0]) | int(row[1]) << 64 == native.digest_run(records[block])
    for block in records:
        scene.write_block(block, bytes(scene.record_bytes))
    loaded = scene.run(CopyDirection.LOAD, [1, 2, 5], has_digests=True)
    assert loaded.fault == ""
    assert loaded.digests is not None
    assert loaded.digests.tolist() == saved.digests[[1, 2, 0]].tolist()
    assert {block: scene.read_block(block) for block in records} == records


def test_copies_come_after_what_the_stream_was_given_before(scene: Scene) -> None:
    stream = scene.driver.open_stream()
    (run, *_) = scene.page_map.block_runs(0, 3)
    for pattern in range(20):
        scene.driver.compute(stream, scene.memory[run.allocation] + run.start, run.length, pattern)
        ticket = scene.engine.submit(CopyDirection.SAVE, scene.items([3]), after=stream)
        scene.engine.make_wait(stream, ticket, TIMEOUT_S)
        scene.driver.compute(stream, scene.memory[run.allocation] + run.start, run.length, 99)
        assert scene.engine.fence(TIMEOUT_S)
        assert [finished.fault for finished in scene.engine.poll()] == [""]
        record = scene.record(3)[run.record_offset : run.record_offset + run.length]
        assert record == scene.driver.pattern(pattern, run.length)


def test_copies_come_after_what_a_mark_saw_and_not_after_the_rest(scene: Scene) -> None:
    stream = scene.driver.open_stream()
    (run, *_) = scene.page_map.block_runs(0, 3)
    page = scene.memory[run.allocation] + run.start
    scene.driver.compute(stream, page, run.length, 5)
    point = scene.engine.mark(stream)
    other = scene.memory[run.allocation] + scene.page_map.block_runs(0, 4)[0].start
    scene.driver.compute(stream, other, run.length, 6)
    scene.engine.submit(CopyDirection.SAVE, scene.items([3]), after=point)
    assert scene.engine.fence(TIMEOUT_S)
    assert [finished.fault for finished in scene.engine.poll()] == [""]
    record = scene.record(3)[run.record_offset : run.record_offset + run.length]
    assert record == scene.driver.pattern(5, run.length)


def test_a_mark_of_another_engine_is_refused(scene: Scene) -> None:
    point = scene.engine.mark(scene.driver.open_stream())
    with (
        CudaEngine(scene.page_map, scene.memory, device=0, library=scene.driver.library) as other,
        pytest.raises(UnsupportedError, match="marked by another copy engine"),
    ):
        other.submit(CopyDirection.SAVE, scene.items([3]), after=point)
    del point
    scene.engine.close(TIMEOUT_S)
    with pytest.raises(NativeError, match="closed"):
        scene.engine.mark(0)


def test_registration_is_told_as_far_as_it_is(scene: Scene) -> None:
    assert scene.engine.registration.is_done
    size_bytes = len(scene.slots) // PAGE_BYTES * PAGE_BYTES
    scene.engine.add_host_range(scene.address, size_bytes)
    scene.run(CopyDirection.SAVE, [1])
    wait_for_registration(scene)
    assert scene.engine.registration.registered_bytes == scene.engine.registration.asked_bytes == size_bytes
    assert scene.engine.registration.problem == ""


def test_memory_that_is_removed_leaves_and_its_slots_are_copied_all_the_same(scene: Scene) -> None:
    scene.engine.add_host_range(scene.address, 2 * PAGE_BYTES)
    wait_for_registration(scene)
    assert scene.driver.registrations == 1
    scene.engine.remove_host_range(scene.address, 2 * PAGE_BYTES)
    while scene.engine.registration.is_leaving:
        assert scene.run(CopyDirection.SAVE, [1]).fault == ""
    assert scene.driver.registrations == 0
    assert scene.engine.registration.registered_bytes == scene.engine.registration.asked_bytes == 0
    scene.write_block(2, bytes(range(7)) * (scene.record_bytes // 7) + bytes(scene.record_bytes % 7))
    assert scene.run(CopyDirection.SAVE, [2]).fault == ""
    assert scene.record(2) == scene.read_block(2)
    with pytest.raises(UnsupportedError, match="cannot be removed"):
        scene.engine.remove_host_range(scene.address, 2 * PAGE_BYTES)


def test_memory_that_is_registered_twice_comes_with_what_to_do(scene: Scene) -> None:
    for _ in range(2):
        scene.engine.add_host_range(scene.address, PAGE_BYTES)
    wait_for_registration(scene)
    problem = scene.engine.registration.problem
    assert problem.startswith(
        f"cuMemHostRegister of {PAGE_BYTES} bytes: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; give "
    )
    assert scene.run(CopyDirection.SAVE, [1, 7]).fault == ""


@pytest.mark.parametrize(("address", "size_bytes"), [(4096, 0), (2**64 - 4096, 8192)])
def test_a_range_that_is_none_is_refused(scene: Scene, address: int, size_bytes: int) -> None:
    with pytest.raises(UnsupportedError, match="cannot be registered"):
        scene.engine.add_host_range(address, size_bytes)


def test_wrong_blocks_and_tickets_are_refused(scene: Scene) -> None:
    with pytest.raises(BlockCountError):
        scene.engine.submit(CopyDirection.SAVE, scene.items([8]))
    with pytest.raises(UnsupportedError, match="loaded twice"):
        scene.engine.submit(CopyDirection.LOAD, scene.items([1, 1]))
    with pytest.raises(UnsupportedError, match="no ticket 7"):
        scene.engine.make_wait(0, 7, 0)


def test_a_full_queue_is_refused_and_a_closed_engine_too() -> None:
    scene = Scene(plan_limit=1)
    scene.engine.submit(CopyDirection.SAVE, scene.items([1]))
    with pytest.raises(NativeError, match="poll to make room"):
        scene.engine.submit(CopyDirection.SAVE, scene.items([2]))
    scene.engine.close(TIMEOUT_S)
    assert len(scene.engine.poll()) == 1
    with pytest.raises(NativeError, match="closed"):
        scene.engine.submit(CopyDirection.SAVE, scene.items([2]))
    assert scene.driver.report_count == 0


def test_whether_kernels_can_be_used_is_told(scene: Scene) -> None:
    has_kernels = bool(native.capabilities().kernel_archs)
    assert scene.engine.kernel_problem == ("" if has_kernels else "this build has no kernels")
    assert not scene.engine.is_lost


def test_a_way_that_is_none_is_refused(scene: Scene) -> None:
    way: Any = SimpleNamespace(value="teleport")
    with pytest.raises(ValueError, match="batch, staged or mapped"):
        scene.engine.set_ways((WayRule(direction=CopyDirection.LOAD, run_bytes=1, runs=1, way=way),))


def test_no_driver_and_no_such_device_are_told(scene: Scene) -> None:
    for settings in ({"library": "libno_such_driver.so"}, {"device": 99, "library": scene.driver.library}):
        with pytest.raises(NativeError, match="no CUDA engine can be made"):
            CudaEngine(scene.page_map, scene.memory, **settings)  # type: ignore[arg-type]


def test_memory_of_the_host_and_of_several_gpus_is_refused() -> None:
    with pytest.raises(StorageError, match="allocation kv is on cpu"):
        find_device({"kv": torch.zeros(1)}, None)
    on = [SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1)]
    assert find_device({"a": on[1]}, None) == 1  # type: ignore[dict-item]
    assert find_device({}, 2) == 2
    with pytest.raises(StorageError, match="several GPUs: 0, 1"):
        find_device({"a": on[0], "b": on[1]}, None)  # type: ignore[dict-item]
    with pytest.raises(StorageError, match="several GPUs: 1, 2"):
        find_device({"b": on[1]}, 2)  # type: ignore[dict-item]
