"""Where parts of layers lie: runs from declared strides and named dimensions."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import BlockCountError, GeometryError, StorageError, StrideError
from kvoffload.kvspec import Allocation, Dim, LayerSpec, Placement, Run, opaque_layer, place_dims, place_strided
from kvoffload.kvspec.placement import MAX_RUNS, find_runs
from tests.kit.kvspec.builders import attention

# A page of 64 bytes: 2 tokens, 2 heads, keys and values of 4 bfloat16.
LAYER = attention("l")


def dims(text: str) -> tuple[Dim, ...]:
    """ "block 3 64, byte 64 1" as dimensions."""
    return tuple(Dim(name, int(size), int(stride)) for name, size, stride in (part.split() for part in text.split(",")))


def place(text: str, *, num_blocks: int = 3, layer: LayerSpec = LAYER, **changes: object) -> Placement:
    return place_dims(layer, allocation="kv", dims=dims(text), num_blocks=num_blocks, **changes)  # type: ignore[arg-type]


def test_a_strided_page_is_where_the_engine_says() -> None:
    placed = place_strided(LAYER, allocation="kv", offset=100, layer_stride=1000, layer_index=2, block_stride=80)
    assert placed.runs == (Run("kv", 2100, 80, 64),)
    assert (placed.offset, placed.padding, placed.tensor) == (2100, (), "l")


def test_a_slot_declares_the_padding_after_its_page() -> None:
    placed = place_strided(LAYER, allocation="kv", offset=100, block_stride=96, slot_bytes=80)
    assert placed.padding == (Run("kv", 164, 96, 16),)


@pytest.mark.parametrize(
    ("declared", "bases", "stride", "length", "order"),
    [
        # (blocks, 2, tokens, heads, content): one run.
        (
            "block 3 64, kv 2 32, token 2 16, head 2 8, content 4 2, byte 2 1",
            [0], 64, 64, "kv token head content byte",
        ),
        # (2, blocks, tokens, heads, content): keys, then values.
        (
            "kv 2 96, block 3 32, token 2 16, head 2 8, content 4 2, byte 2 1",
            [0, 96], 32, 32, "kv token head content byte",
        ),
        # The same with heads before tokens in memory: other order, same runs.
        (
            "kv 2 96, block 3 32, token 2 8, head 2 16, content 4 2, byte 2 1",
            [0, 96], 32, 32, "kv head token content byte",
        ),
        # [B, H, N, C] views, blocks first, then heads outermost.
        ("block 3 64, head 2 32, token 2 16, content 8 2, byte 2 1", [0], 64, 64, "head token content byte"),
        ("block 3 32, head 2 96, token 2 16, content 8 2, byte 2 1", [0, 96], 32, 32, "head token content byte"),
        # Kernel blocks of one token: dense ones merge, keys-first ones too.
        ("block 6 32, head 2 16, token 1 16, content 8 2, byte 2 1", [0], 64, 64, "kernel head content byte"),
        ("kv 2 96, block 6 16, head 2 8, content 4 2, byte 2 1", [0, 96], 32, 32, "kv kernel head content byte"),
        # Blocks outermost, another layer's 64 bytes between the heads.
        ("block 3 128, head 2 64, token 2 16, content 8 2, byte 2 1", [0, 64], 128, 32, "head token content byte"),
    ],
)  # fmt: skip
def test_dimensions_become_runs(declared: str, bases: list[int], stride: int, length: int, order: str) -> None:
    placed = place(declared)
    assert placed.runs == tuple(Run("kv", base, stride, length) for base in bases)
    assert " ".join(name for name, _ in placed.order) == order
    assert placed.block_dim == [dim.name for dim in dims(declared)].index("block")


def test_the_block_dimension_is_the_one_with_that_name() -> None:
    """All sizes equal: nothing but the name tells (vLLM #37236)."""
    layer = opaque_layer("l", block_size=2, page_bytes=8, dtype="x")
    first = place("block 2 8, kv 2 4, head 2 2, byte 2 1", num_blocks=2, layer=layer)
    second = place("kv 2 8, block 2 4, head 2 2, byte 2 1", num_blocks=2, layer=layer)
    third = place("kv 2 8, head 2 4, block 2 2, byte 2 1", num_blocks=2, layer=layer)
    assert [run.base for run in first.runs] == [0]
    assert [run.base for run in second.runs] == [0, 8]
    assert [run.base for run in third.runs] == [0, 4, 8, 12]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    where=st.integers(0, 4),
    num_blocks=st.integers(1, 3),
    split=st.integers(1, 2),
)
def test_runs_are_the_bytes_of_the_block_and_no_others(
    sizes: list[int], gaps: list[int], where: int, num_blocks: int, split: int
) -> None:
    """Any nesting of dimensions with gaps between them, the block dimension anywhere."""
    names = [f"d{index}" for index in range(len(sizes))]
    names.insert(min(where, len(names)), "block")
    counts = dict(zip([name for name in names if name != "block"], sizes, strict=True))
    declared, step = [Dim("byte", 2, 1)], 2
    for name, gap in zip(reversed(names), gaps, strict=False):
        size = counts.get(name, num_blocks * split)
        declared.append(Dim(name, size, step + gap))
        step = (step + gap) * size
    page = 2 * prod(sizes) * split
    layer = opaque_layer("l", block_size=2, page_bytes=page, dtype="x")
    placed = place_dims(layer, allocation="kv", dims=declared, num_blocks=num_blocks, offset=5)
    for block in range(num_blocks):
        covered = [run.base + block * run.stride + i for run in placed.runs for i in range(run.length)]
        entries = range(block * split, (block + 1) * split)
        expected = {
            5 + sum(index * dim.stride for index, dim in zip(indices, declared, strict=True))
            for indices in product(*(entries if dim.name == "block" else range(dim.size) for dim in declared))
        }
        assert len(covered) == len(set(covered)) == page
        assert set(covered) == expected


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        ("rows 3 64, byte 64 1", GeometryError, "0 dimensions are named block"),
        ("block 3 64, block 2 32, byte 32 1", GeometryError, "2 dimensions are named block"),
        ("block 4 64, byte 64 1", BlockCountError, "has 4 entries, expected 3 blocks of 1"),
        ("block 3 32, byte 32 1", BlockCountError, "has 3 entries, expected 3 blocks of 2"),
        ("block 3 48, byte 48 1", StrideError, "64 bytes per block, but an entry of the block dimension has 48"),
        ("block 3 32, byte 64 1", StrideError, "blocks of 64 bytes are 32 bytes apart"),
        ("block 3 128, content 32 4, word 2 2", StrideError, "no dimension has a stride of 1 byte"),
        ("block 3 64, head 2 0, byte 32 1", StrideError, "dimension head has size 2, stride 0"),
        ("block 3 64, head 0 32, byte 32 1", StrideError, "dimension head has size 0"),
    ],
)
def test_dimensions_that_contradict_the_layer_are_refused(
    declared: str, error: type[GeometryError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        place(declared)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_stride": 32}, StrideError, "blocks of 64 bytes are 32 bytes apart"),
        ({"block_stride": 80, "slot_bytes": 96}, StrideError, "a slot of 96 bytes for a page of 64 every 80"),
        ({"block_stride": 80, "slot_bytes": 32}, StrideError, "a slot of 32 bytes for a page of 64 every 80"),
        ({"block_stride": 64, "offset": -1}, StrideError, "bases not negative"),
        ({"block_stride": 64, "kernel_blocks": 3}, BlockCountError, "not 3 equal kernel blocks"),
        ({"block_stride": 80, "kernel_blocks": 2}, StrideError, "use a layer-compact layout"),
        ({"block_stride": 64, "part": "scales"}, GeometryError, "part 'scales' has no declared size"),
    ],
)
def test_strides_that_cannot_be_are_refused(
    changes: dict[str, object], error: type[GeometryError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        place_strided(LAYER, allocation="kv", **changes)  # type: ignore[arg-type]
    assert caught.value.remedy


def test_padding_of_a_page_in_pieces_is_declared_apart() -> None:
    with pytest.raises(GeometryError, match="slot_bytes with a page of 2 runs"):
        place("kv 2 96, block 3 32, byte 32 1", slot_bytes=64)


def test_a_page_in_too_many_pieces_is_refused() -> None:
    with pytest.raises(StrideError, match="more than 65536 pieces of 2 bytes"):
        find_runs([Dim("token", MAX_RUNS + 1, 4), Dim("byte", 2, 1)], label="l")


def test_dimensions_may_be_listed_in_another_order_than_the_tensors() -> None:
    """vLLM's views are always [B, H, N, C]; a layout lists its dimensions in the order of memory."""
    declared = "head 2 96, block 3 32, token 2 16, content 8 2, byte 2 1"
    assert place(declared).block_dim == 1
    assert place(declared, tensor_block_dim=0).block_dim == 0


def test_with_one_block_the_stride_does_not_matter() -> None:
    """torch reports any number for a dimension of size 1."""
    assert place("block 1 1, byte 64 1", num_blocks=1).runs == (Run("kv", 0, 64, 64),)


def test_a_placement_needs_runs() -> None:
    with pytest.raises(GeometryError, match="no runs"):
        Placement(layer="l", part="kv", tensor="l", offset=0, runs=())


def test_an_allocation_has_bytes() -> None:
    with pytest.raises(StorageError, match="allocation kv: 0 bytes"):
        Allocation(name="kv", size_bytes=0)


def test_tensors_are_named_after_layer_and_part() -> None:
    assert place("block 3 64, byte 64 1").tensor == "l"
    keys = place_strided(LAYER, allocation="kv", block_stride=32, part="k")
    assert (keys.tensor, keys.runs[0].length) == ("l.k", 32)
    assert (
        place_strided(LAYER, allocation="kv", block_stride=32, part="k", tensor="key_cache.0").tensor == "key_cache.0"
    )


def test_the_order_inside_a_page_is_kept_for_the_identity() -> None:
    assert place_strided(LAYER, allocation="kv", block_stride=64).order == (("byte", 64),)
    assert place_strided(LAYER, allocation="kv", block_stride=64, kernel_blocks=2).order == (
        ("kernel", 2),
        ("byte", 32),
    )
    assert place_strided(LAYER, allocation="kv", block_stride=64, order=[("head", 2), ("token", 2)]).order == (
        ("head", 2),
        ("token", 2),
    )
