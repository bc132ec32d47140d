"""The common part of copy engines: pages as addresses, memory that is checked, items that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvoffload.errors import (
    BlockCountError,
    KVOffloadError,
    NativeError,
    RegistrationError,
    StorageError,
    UnsupportedError,
)
from kvoffload.kvspec import Allocation, build_page_map, place_strided
from kvoffload.transfer.copy_engine import CopyDirection, CopyItems, find_addresses, list_runs
from kvoffload.transfer.host_engine import HostEngine
from tests.kit.kvspec.builders import dense, qwen3next


def make_items(group: int, blocks: list[int], slots: list[int]) -> CopyItems:
    return CopyItems(group=np.full(len(blocks), group), block=np.array(blocks), slot=np.array(slots, np.uint64))


def test_runs_have_addresses() -> None:
    page_map = build_page_map(dense(3))
    ((record_bytes, base, stride, length, offset, allocation),) = list_runs(page_map, {"kv": 1000})
    assert record_bytes == 128
    assert (base.tolist(), stride.tolist()) == ([1000, 1192], [64, 64])
    assert (length.tolist(), offset.tolist()) == ([64, 64], [0, 64])
    assert allocation.tolist() == [0, 0]


def test_every_group_has_its_runs() -> None:
    page_map = build_page_map(qwen3next(2))
    runs = list_runs(page_map, {"kv": 4096})
    assert [record_bytes for record_bytes, *_ in runs] == [pages.record_bytes for pages in page_map.groups]


def test_runs_name_their_allocations() -> None:
    geometry = dense(3)
    halves = tuple(Allocation(name=name, size_bytes=192) for name in ("low", "high"))
    placements = tuple(
        place_strided(layer, allocation=half.name, block_stride=64)
        for layer, half in zip(geometry.groups[0].layers, halves, strict=True)
    )
    page_map = build_page_map(replace(geometry, allocations=halves, placements=placements))
    # In one piece of memory, as it happens.
    ((_, base, _, _, _, allocation),) = list_runs(page_map, {"low": 1000, "high": 1192})
    assert (base.tolist(), allocation.tolist()) == ([1000, 1192], [0, 1])


def test_an_allocation_without_memory_is_refused() -> None:
    with pytest.raises(RegistrationError, match="allocation kv is not registered"):
        list_runs(build_page_map(dense(3)), {"other": 1000})


def test_tensors_are_found_where_they_lie() -> None:
    larger = torch.zeros(500, dtype=torch.uint8)
    page_map = build_page_map(dense(2))
    assert find_addresses(page_map, {"kv": larger[100:], "unknown": larger}) == {"kv": larger.data_ptr() + 100}
    assert find_addresses(page_map, {"kv": 4096}) == {"kv": 4096}


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(255, dtype=torch.uint8),
        torch.zeros(256, dtype=torch.int8),
        torch.zeros(4, 64, dtype=torch.uint8),
        torch.zeros(512, dtype=torch.uint8)[::2],
    ],
)
def test_memory_is_flat_bytes_and_long_enough(flat: torch.Tensor) -> None:
    with pytest.raises(StorageError, match="expected 256 flat uint8"):
        find_addresses(build_page_map(dense(2)), {"kv": flat})


@pytest.mark.parametrize(
    ("direction", "items", "error", "message"),
    [
        (CopyDirection.LOAD, make_items(0, [1, 1], [64, 256]), UnsupportedError, "block 1 of group 0 is loaded twice"),
        (CopyDirection.LOAD, make_items(0, [3], [64]), BlockCountError, "block 3 is not one of 0 to 2"),
        (CopyDirection.SAVE, make_items(0, [-1], [64]), BlockCountError, "block -1 is not one of 0 to 2"),
        (CopyDirection.SAVE, make_items(0, [2, 0], [64, 256]), BlockCountError, "block 0 is the null block"),
        (CopyDirection.SAVE, make_items(1, [1], [64]), UnsupportedError, "group 1 is not one of the 1"),
        (CopyDirection.SAVE, make_items(-1, [1], [64]), UnsupportedError, "group -1 is not one of the 1"),
        (CopyDirection.SAVE, make_items(0, [1], [0]), UnsupportedError, "its slot is at no possible address"),
        (CopyDirection.SAVE, make_items(0, [1], [2**64 - 127]), UnsupportedError, "no possible address"),
    ],
)
def test_a_wrong_plan_is_refused(
    direction: CopyDirection, items: CopyItems, error: type[KVOffloadError], message: str
) -> None:
    flat = torch.zeros(384, dtype=torch.uint8)
    with HostEngine(build_page_map(dense(3, null_block=0)), {"kv": flat}, threads=1) as engine:
        with pytest.raises(error, match=message) as caught:
            engine.submit(direction, items)
        assert caught.value.remedy
        assert engine.fence(60)
        assert engine.poll() == []


@pytest.mark.parametrize("lengths", [(1, 2, 1), (2, 1, 2), (2, 2, 3)])
def test_items_have_a_group_a_block_and_a_slot_each(lengths: tuple[int, int, int]) -> None:
    group, block, slot = (np.ones(length, np.int64) for length in lengths)
    with pytest.raises(UnsupportedError, match="{} groups, {} blocks and {} slots".format(*lengths)):
        CopyItems(group=group, block=block, slot=slot)


def test_a_load_writes_no_byte_twice() -> None:
    """Groups share a pool: one block of two of them is one memory, which a save may well read twice."""
    geometry = qwen3next(3)
    page_map = build_page_map(geometry)
    records = torch.zeros(4 * max(pages.record_bytes for pages in page_map.groups), dtype=torch.uint8)
    slot = records.data_ptr()
    same = CopyItems(group=np.array([0, 2]), block=np.array([1, 1]), slot=np.array([slot, slot + records.numel() // 2]))
    other = CopyItems(group=np.array([0, 2]), block=np.array([1, 2]), slot=same.slot)
    flat = torch.zeros(geometry.allocations[0].size_bytes, dtype=torch.uint8)
    with HostEngine(page_map, {geometry.allocations[0].name: flat}, threads=1) as engine:
        with pytest.raises(UnsupportedError, match="block 1 of group 2 shares bytes with that of group 0"):
            engine.submit(CopyDirection.LOAD, same)
        engine.submit(CopyDirection.LOAD, other)
        engine.submit(CopyDirection.SAVE, same)
        assert engine.fence(60)
        assert [finished.fault for finished in engine.poll()] == ["", ""]


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 1e-9, 0.0, -1.0])
def test_any_time_can_be_waited(timeout_s: float) -> None:
    with HostEngine(build_page_map(dense(3)), {"kv": torch.zeros(384, dtype=torch.uint8)}, threads=1) as engine:
        assert engine.fence(timeout_s)
        engine.close(timeout_s)


def test_what_is_not_polled_is_bounded() -> None:
    flat = torch.zeros(384, dtype=torch.uint8)
    with HostEngine(build_page_map(dense(3)), {"kv": flat}, threads=1, plan_limit=2) as engine:
        empty = make_items(0, [], [])
        assert [engine.submit(CopyDirection.SAVE, empty) for _ in range(2)] == [1, 2]
        with pytest.raises(NativeError, match="poll to make room"):
            engine.submit(CopyDirection.SAVE, empty)
        assert engine.fence(60)
        assert sorted(finished.ticket for finished in engine.poll()) == [1, 2]
        assert engine.submit(CopyDirection.SAVE, empty) == 3
