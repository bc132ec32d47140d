"""The simplest copy engine: identity on covered bytes, nothing else touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import BlockCountError, KVOffloadError, RegistrationError, StorageError, UnsupportedError
from kvoffload.kvspec import KVGeometry, PageMap, build_page_map
from tests.kit.kvspec.builders import dense, qwen3next
from tests.kit.kvspec.strategies import at_least, geometries
from tests.kit.transfer.memory import new_records, random_memory
from tests.kit.transfer.plain_copy import PlainCopy


def read_record(page_map: PageMap, memory: dict[str, torch.Tensor], group: int, block: int) -> list[int]:
    """One block's record by the list of its runs."""
    return [
        byte
        for run in page_map.block_runs(group, block)
        for byte in memory[run.allocation][run.start : run.start + run.length].tolist()
    ]


@given(geometry=geometries(), data=st.data())
@at_least(200)
def test_save_scrub_load_is_the_identity_and_touches_nothing_else(geometry: KVGeometry, data: st.DataObject) -> None:
    page_map = build_page_map(geometry)
    group = data.draw(st.integers(0, len(geometry.groups) - 1))
    blocks = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), unique=True))
    memory = random_memory(geometry, seed=group)
    original = {name: flat.clone() for name, flat in memory.items()}
    copy = PlainCopy(page_map, memory)
    records = new_records(page_map, group, len(blocks))

    copy.save(group, blocks, records)
    assert records.tolist() == [read_record(page_map, memory, group, block) for block in blocks]
    assert all(torch.equal(memory[name], original[name]) for name in memory), "saving only reads"

    for flat in memory.values():
        torch.bitwise_not(flat, out=flat)
    scrubbed = {name: flat.clone() for name, flat in memory.items()}
    copy.load(group, blocks, records)

    covered = {name: torch.zeros_like(flat, dtype=torch.bool) for name, flat in memory.items()}
    for block in blocks:
        for run in page_map.block_runs(group, block):
            covered[run.allocation][run.start : run.start + run.length] = True
    for name, flat in memory.items():
        expected = torch.where(covered[name], original[name], scrubbed[name])
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("blocks", [[], [0], [0, 2], [2, 0, 1], [1, 2], range(3), np.array([2, 1])])
def test_blocks_in_any_order(blocks: Sequence[int]) -> None:
    geometry = dense(3)
    memory = random_memory(geometry)
    page_map = build_page_map(geometry)
    records = new_records(page_map, 0, len(blocks))
    PlainCopy(page_map, memory).save(0, blocks, records)
    assert records.tolist() == [read_record(page_map, memory, 0, int(block)) for block in blocks]


def test_a_block_moves_to_another_block_of_the_same_group() -> None:
    geometry = qwen3next(3)
    memory = random_memory(geometry)
    page_map = build_page_map(geometry)
    copy = PlainCopy(page_map, memory)
    records = new_records(page_map, 1, 1)
    copy.save(1, [1], records)
    full = read_record(page_map, memory, 3, 2)
    copy.load(1, [2], records)
    assert read_record(page_map, memory, 1, 2) == read_record(page_map, memory, 1, 1)
    assert read_record(page_map, memory, 3, 2)[268_288:] == full[268_288:], "the rest of the slot is another group's"


def test_memory_may_be_a_view_into_something_larger() -> None:
    geometry = dense(2)
    page_map = build_page_map(geometry)
    larger = torch.arange(512).to(torch.uint8)
    copy = PlainCopy(page_map, {"kv": larger[100:]})
    records = new_records(page_map, 0, 1)
    copy.save(0, [1], records)
    assert records[0, :64].tolist() == larger[164:228].tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda copy, rows: copy.load(0, [1, 1], rows(2)), UnsupportedError, "a block is loaded twice"),
        (lambda copy, rows: copy.load(0, [3], rows(1)), BlockCountError, "block 3 is not one of 0 to 2"),
        (lambda copy, rows: copy.save(0, [0], rows(1)), BlockCountError, "block 0 is the null block"),
        (lambda copy, rows: copy.save(0, [1], rows(2)), StorageError, r"shape \(2, 128\), expected uint8 of shape \(1"),
        (lambda copy, rows: copy.save(0, [1], rows(1)[:, 1:]), StorageError, r"shape \(1, 127\)"),
        (lambda copy, rows: copy.save(0, [1], rows(1).to(torch.int8)), StorageError, "records are torch.int8"),
    ],
)
def test_a_wrong_call_is_refused(call: object, error: type[KVOffloadError], message: str) -> None:
    assert callable(call)
    geometry = dense(3, null_block=0)
    page_map = build_page_map(geometry)
    memory = random_memory(geometry)
    before = memory["kv"].clone()
    with pytest.raises(error, match=message) as caught:
        call(PlainCopy(page_map, memory), lambda count: new_records(page_map, 0, count))
    assert caught.value.remedy
    assert torch.equal(memory["kv"], before)


@pytest.mark.parametrize(
    "memory", [torch.zeros(255, dtype=torch.uint8), torch.zeros(256, dtype=torch.int8), torch.zeros(4, 64).byte()]
)
def test_memory_is_flat_bytes_and_long_enough(memory: torch.Tensor) -> None:
    with pytest.raises(StorageError, match="expected 256 flat uint8"):
        PlainCopy(build_page_map(dense(2)), {"kv": memory})


def test_after_close_nothing_is_held_and_nothing_moves() -> None:
    geometry = dense(2)
    page_map = build_page_map(geometry)
    copy = PlainCopy(page_map, random_memory(geometry))
    copy.close()
    with pytest.raises(RegistrationError, match="allocation kv is not registered"):
        copy.save(0, [0], new_records(page_map, 0, 1))
