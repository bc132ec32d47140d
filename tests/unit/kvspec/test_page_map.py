"""Records and device runs, and the matrix of rule 1: everything that made peers count blocks wrong, all together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kvoffload.errors import BlockCountError, GeometryError
from kvoffload.kvspec import (
    LAYOUTS,
    Allocation,
    BlockRun,
    GroupSpec,
    KVGeometry,
    LayerSpec,
    Placement,
    ScalePlacement,
    attention_layer,
    build_page_map,
    check_tensor,
    place_dims,
    place_strided,
    prove_complete,
    read_facts,
    tensor_dims,
)
from tests.kit.kvspec.builders import attention, dense, in_layout, one_group, qwen3next
from tests.kit.kvspec.layouts import layer_dims
from tests.kit.transfer.plain_copy import PlainCopy

MATRIX = list(product((2, 3, 64), (1, 2, 3), (2, 16), sorted(LAYOUTS), (1, 2)))


@pytest.mark.parametrize(("num_blocks", "heads", "block_size", "layout", "split"), MATRIX)
def test_matrix_of_counts_layouts_splits_and_page_sizes(
    num_blocks: int, heads: int, block_size: int, layout: str, split: int
) -> None:
    """vLLM #38554 and #37236 together, over two layer families of different page sizes in one group.

    Tensors are made by torch in memory order; block b is written through torch's own indexing, and must be all that the
    record of block b has.
    """
    cache = Cache(num_blocks=num_blocks, block_size=block_size, split=split, layout=layout)
    for head_size in (8, 4):
        cache.add_family(heads=heads, head_size=head_size, num_layers=2)
    geometry = cache.finish()
    prove_complete(geometry)
    for view, placement in zip(cache.views, cache.placements, strict=True):
        facts = read_facts(placement.tensor, view)
        check_tensor(facts, placement, num_blocks=num_blocks, allocation_address=facts.storage_address)
    page_map = build_page_map(geometry)
    copy = PlainCopy(page_map, cache.memory)
    for block in range(num_blocks):
        cache.fill(block, lambda layer, block=block: 1 + layer + 10 * block)
    records = torch.zeros(num_blocks, page_map.groups[0].record_bytes, dtype=torch.uint8)
    copy.save(0, range(num_blocks), records)
    numbers = records.view(torch.int16)
    for block in range(num_blocks):
        for layer, part in enumerate(page_map.groups[0].parts):
            own = numbers[block, part.offset // 2 : (part.offset + part.length) // 2]
            assert (own == 1 + layer + 10 * block).all(), (block, part)
    before = {name: flat.clone() for name, flat in cache.memory.items()}
    cache.fill(1, lambda layer: -7)
    copy.load(0, [1], records[1:2])
    assert all(torch.equal(before[name], flat) for name, flat in cache.memory.items())


class Cache:
    """One allocation per family of equal layers, laid out by torch."""

    def __init__(self, *, num_blocks: int, block_size: int, split: int, layout: str) -> None:
        self.num_blocks, self.block_size, self.split, self.layout = num_blocks, block_size, split, LAYOUTS[layout]
        self.layers: list[LayerSpec] = []
        self.placements: list[Placement] = []
        self.views: list[torch.Tensor] = []
        self.memory: dict[str, torch.Tensor] = {}

    def add_family(self, *, heads: int, head_size: int, num_layers: int) -> None:
        order = self.layout.order
        content = head_size if "kv" in order else 2 * head_size
        sizes = {
            "layer": num_layers,
            "block": self.num_blocks * self.split,
            "kv": 2,
            "head": heads,
            "token": self.block_size // self.split,
            "content": content,
        }
        physical = torch.zeros([sizes[name] for name in order], dtype=torch.int16)
        allocation = f"family {len(self.memory)}"
        self.memory[allocation] = physical.view(-1).view(torch.uint8)
        dims = tensor_dims(order, shape=physical.shape, strides=physical.stride(), itemsize=2)
        for index in range(num_layers):
            layer = attention_layer(
                f"layers.{len(self.layers)}",
                block_size=self.block_size,
                num_kv_heads=heads,
                head_size=head_size,
                dtype="bfloat16",
            )
            offset, inner = layer_dims(dims, index)
            self.layers.append(layer)
            self.views.append(physical.select(order.index("layer"), index))
            self.placements.append(
                place_dims(layer, allocation=allocation, dims=inner, num_blocks=self.num_blocks, offset=offset)
            )

    def fill(self, block: int, number: object) -> None:
        assert callable(number)
        block_dim = [name for name in self.layout.order if name != "layer"].index("block")
        for index, view in enumerate(self.views):
            view.narrow(block_dim, block * self.split, self.split).fill_(number(index))

    def finish(self) -> KVGeometry:
        return KVGeometry(
            num_blocks=self.num_blocks,
            hash_block_size=self.block_size,
            groups=(GroupSpec(name="uniform type", layers=tuple(self.layers), block_size=self.block_size),),
            allocations=tuple(Allocation(name=name, size_bytes=flat.numel()) for name, flat in self.memory.items()),
            placements=tuple(self.placements),
            layout=self.layout.name,
        )


@pytest.mark.parametrize(
    ("layout", "runs", "length"),
    [
        ("LBHNC", 3, 65536),
        ("LHBNC", 3 * 8, 8192),
        ("BLHNC", 1, 3 * 65536),
        ("BLNHC", 1, 3 * 65536),
        ("BHLNC", 3 * 8, 8192),
        ("KV_BLOCK_NHD", 3 * 2, 32768),
        ("BLOCK_KV_HND", 3, 65536),
    ],
)
@pytest.mark.parametrize("num_blocks", [2, 100_000])
def test_runs_are_merged_where_they_touch(layout: str, runs: int, length: int, num_blocks: int) -> None:
    """Runs touch in memory and in the record. Their number does not depend on the number of blocks."""
    (pages,) = build_page_map(in_layout(layout, num_layers=3, num_blocks=num_blocks)).groups
    assert (pages.num_runs, pages.record_bytes) == (runs, 3 * 65536)
    assert (pages.length == length).all()
    assert pages.record_offset.tolist() == [index * length for index in range(runs)]


def test_the_record_of_qwen3next() -> None:
    page_map = build_page_map(qwen3next(4))
    assert [pages.record_bytes for pages in page_map.groups] == [268_288, 268_288, 268_288, 327_680]
    assert page_map.block_runs(0, 3) == [BlockRun("kv", 3 * 327_680, 268_288, 0)]
    assert page_map.block_runs(3, 3) == [BlockRun("kv", 3 * 327_680, 327_680, 0)]


def test_aliases_are_stored_once_and_exclusions_never() -> None:
    own, last = attention("own"), attention("last")
    group = one_group(own, attention("alias", alias_of="own"), attention("draft", excluded="rebuilt"), last)
    geometry = dense(
        2,
        groups=(group, one_group(attention("host", excluded="on the host"), name="host")),
        placements=(
            place_strided(last, allocation="kv", block_stride=64),
            place_strided(own, allocation="kv", offset=128, block_stride=64),
        ),
    )
    stored, host = build_page_map(geometry).groups
    assert [(part.layer, part.offset, part.length) for part in stored.parts] == [("own", 0, 64), ("last", 64, 64)]
    assert stored.base.tolist() == [128, 0]
    assert (host.record_bytes, host.num_runs) == (0, 0)
    assert build_page_map(geometry).block_runs(1, 0) == []


def test_scales_beside_follow_their_pages_in_the_record() -> None:
    layer = attention("l", dtype="int8_per_token_head", scales=ScalePlacement.BESIDE)
    placed = (
        place_strided(layer, allocation="scales", block_stride=32, part="scales"),
        place_strided(layer, allocation="kv", block_stride=32),
    )
    allocations = tuple(Allocation(name=name, size_bytes=64) for name in ("kv", "scales"))
    geometry = dense(2, groups=(one_group(layer),), placements=placed, allocations=allocations)
    assert build_page_map(geometry).block_runs(0, 1) == [BlockRun("kv", 32, 32, 0), BlockRun("scales", 32, 32, 32)]


@pytest.mark.parametrize(
    ("block", "message"),
    [(-1, "block -1 is not one of 0 to 2"), (3, "block 3 is not one of 0 to 2"), (0, "block 0 is the null block")],
)
def test_blocks_that_are_none_are_refused(block: int, message: str) -> None:
    page_map = build_page_map(dense(3, null_block=0))
    with pytest.raises(BlockCountError, match=message) as caught:
        page_map.block_runs(0, block)
    assert caught.value.remedy
    with pytest.raises(BlockCountError, match=message):
        page_map.check_blocks(np.array([1, 2, block]), group=0)


def test_a_group_may_have_fewer_blocks_than_others() -> None:
    geometry = dense(3)
    (group,) = geometry.groups
    page_map = build_page_map(replace(geometry, groups=(replace(group, num_blocks=2),), exclusions=()))
    assert page_map.count_blocks(0) == 2
    page_map.check_blocks([0, 1], group=0)
    with pytest.raises(BlockCountError, match="block 2 is not one of 0 to 1"):
        page_map.check_blocks([2], group=0)


def test_block_ids_come_in_any_form() -> None:
    page_map = build_page_map(dense(3))
    for ids in ([0, 2], (0, 2), range(0, 3, 2), np.array([0, 2], dtype=np.int32)):
        assert page_map.check_blocks(ids, group=0).tolist() == [0, 2]
    assert page_map.check_blocks([], group=0).tolist() == []


def test_a_page_map_cannot_be_changed() -> None:
    (pages,) = build_page_map(dense(3)).groups
    with pytest.raises(ValueError, match="read-only"):
        pages.base[0] = 7


def test_a_byte_of_a_record_has_an_owner() -> None:
    (pages,) = build_page_map(dense(3)).groups
    assert [pages.part_at(offset).layer for offset in (0, 63, 64, 127)] == ["layers.0"] * 2 + ["layers.1"] * 2
    with pytest.raises(GeometryError, match="a record has no byte 128"):
        pages.part_at(128)


def test_runs_of_different_strides_or_allocations_do_not_merge() -> None:
    one, other = attention("one"), attention("other")
    geometry = dense(
        1,
        groups=(one_group(one, other),),
        placements=(
            place_strided(one, allocation="kv", block_stride=64),
            place_strided(other, allocation="kv", offset=64, block_stride=65),
        ),
    )
    assert build_page_map(geometry).groups[0].num_runs == 2
    geometry = replace(
        geometry,
        allocations=(Allocation(name="kv", size_bytes=64), Allocation(name="b", size_bytes=128)),
        placements=(geometry.placements[0], place_strided(other, allocation="b", offset=64, block_stride=64)),
    )
    assert build_page_map(geometry).groups[0].allocation.tolist() == [0, 1]
