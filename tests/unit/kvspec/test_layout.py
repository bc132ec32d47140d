"""Rule 2: layouts are data, and the block dimension is declared."""

from __future__ import annotations

import pytest
import torch

from kvoffload.errors import AmbiguousLayoutError, BlockCountError, GeometryError, StorageError, StrideError
from kvoffload.kvspec import (
    LAYOUTS,
    Dim,
    find_layout,
    resolve_block_dim,
    restride_block_major,
    tensor_dims,
)
from kvoffload.kvspec.layout import block_major_strides
from tests.kit.kvspec.layouts import layer_dims, layout_dims

SIZES = {"layer": 3, "block": 5, "kv": 2, "head": 2, "token": 4, "content": 8}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_layouts_strides_are_those_of_torch(name: str) -> None:
    """A tensor allocated in memory order, looked at through its strides."""
    order = LAYOUTS[name].order
    physical = torch.empty([SIZES[dim] for dim in order], dtype=torch.bfloat16)
    dims = layout_dims(LAYOUTS[name], sizes=SIZES, itemsize=2)
    assert dims == tensor_dims(order, shape=physical.shape, strides=physical.stride(), itemsize=2)
    offset, inner = layer_dims(dims, 2)
    layer = physical.select(order.index("layer"), 2)
    assert offset == layer.storage_offset() * 2
    assert inner == tensor_dims(
        [d for d in order if d != "layer"], shape=layer.shape, strides=layer.stride(), itemsize=2
    )


@pytest.mark.parametrize(
    ("name", "contiguous", "outermost"),
    [
        ("LBHNC", True, False),
        ("LHBNC", False, False),
        ("BLNHC", True, True),
        ("BHLNC", False, True),
        ("KV_BLOCK_NHD", False, False),
        ("BLOCK_KV_HND", True, False),
    ],
)
def test_what_a_layout_means_for_a_page(name: str, contiguous: bool, outermost: bool) -> None:
    assert (LAYOUTS[name].is_page_contiguous, LAYOUTS[name].is_block_outermost) == (contiguous, outermost)


def test_an_engines_own_strides_are_kept_where_given() -> None:
    """vLLM declares layer and block strides; only the rest follows from the layout."""
    sizes = {"layer": 2, "block": 3, "head": 2, "token": 2, "content": 4}
    dims = layout_dims(LAYOUTS["LBHNC"], sizes=sizes, strides={"block": 20, "layer": 100})
    assert [(dim.name, dim.stride) for dim in dims] == [
        ("layer", 100), ("block", 20), ("head", 8), ("token", 4), ("content", 1), ("byte", 1),
    ]  # fmt: skip
    assert layout_dims(LAYOUTS["LBHNC"], sizes=sizes, strides={"block": 20})[0] == Dim("layer", 2, 60)
    with pytest.raises(StrideError, match="dimension block has a stride of 12 bytes, its contents take 16"):
        layout_dims(LAYOUTS["LBHNC"], sizes=sizes, strides={"block": 12})


def test_the_stride_of_a_single_entry_does_not_shrink_what_lies_around_it() -> None:
    """torch and vLLM report any stride for a dimension of size 1."""
    sizes = {"layer": 2, "block": 1, "head": 2, "token": 2, "content": 4}
    dims = layout_dims(LAYOUTS["LBHNC"], sizes=sizes, strides={"block": 1})
    assert dims[0] == Dim("layer", 2, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_layout("NHWC"), "layout 'NHWC' is unknown"),
        (lambda: layout_dims(LAYOUTS["LBHNC"], sizes={"block": 1}), "no size for head"),
        (lambda: layer_dims([Dim("layer", 2, 8), Dim("byte", 8, 1)], 2), "layer 2 of 2"),
        (lambda: layer_dims([Dim("byte", 8, 1)], 0), "layer 0 of 0"),
        (lambda: tensor_dims(["block"], shape=[1, 2], strides=[2, 1], itemsize=1), "1 names, 2 sizes, 2 strides"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(GeometryError, match=message) as caught:
        call()
    assert caught.value.remedy


def test_find_layout_knows_vllms_six() -> None:
    assert [find_layout(name).name for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")]


@pytest.mark.parametrize("declared", [0, 1])
def test_the_declared_block_dimension_wins_where_the_shape_cannot_tell(declared: int) -> None:
    """vLLM #37236: profiling forces two blocks, and (2, num_blocks, ...) reads like (num_blocks, 2, ...)."""
    assert resolve_block_dim((2, 2, 16, 8, 64), num_blocks=2, declared=declared) == declared


def test_an_undeclared_ambiguous_tensor_is_refused_with_both_readings() -> None:
    """vLLM #37236 again: without a declaration there is no answer, and the error says between what."""
    with pytest.raises(AmbiguousLayoutError) as caught:
        resolve_block_dim((2, 2, 16, 8, 64), num_blocks=2)
    assert str(caught.value) == (
        "shape (2, 2, 16, 8, 64) with 2 blocks can be read as (blocks, 2, 16, 8, 64), dimension 0 or "
        "(2, blocks, 16, 8, 64), dimension 1; declare the block dimension; a shape alone does not tell"
    )
    assert caught.value.context["readings"] == (0, 1)


@pytest.mark.parametrize(
    ("shape", "num_blocks", "kernel_blocks", "readings"),
    [
        ((2, 2, 2, 2, 64), 2, 1, (0, 1, 2, 3)),
        ((64, 2, 16, 8, 64), 64, 1, (0, 4)),
        ((2, 4, 16, 4, 64), 2, 2, (1, 3)),
        ((3, 3), 3, 1, (0, 1)),
    ],
)
def test_every_reading_counts(shape: tuple[int, ...], num_blocks: int, kernel_blocks: int, readings: object) -> None:
    with pytest.raises(AmbiguousLayoutError) as caught:
        resolve_block_dim(shape, num_blocks=num_blocks, kernel_blocks=kernel_blocks)
    assert caught.value.context["readings"] == readings
    for reading in readings:  # type: ignore[attr-defined]
        assert resolve_block_dim(shape, num_blocks=num_blocks, kernel_blocks=kernel_blocks, declared=reading) == reading


@pytest.mark.parametrize(
    ("shape", "num_blocks", "kernel_blocks", "expected"),
    [((2, 100, 16, 8, 64), 100, 1, 1), ((100, 2, 16, 8, 64), 100, 1, 0), ((2, 200, 16, 8, 64), 100, 2, 1)],
)
def test_a_single_reading_needs_no_declaration(
    shape: tuple[int, ...], num_blocks: int, kernel_blocks: int, expected: int
) -> None:
    assert resolve_block_dim(shape, num_blocks=num_blocks, kernel_blocks=kernel_blocks) == expected


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (0, "dimension 0 is declared to count blocks and has 2 entries, expected 100 blocks x 1"),
        (7, "dimension 7 is declared to count blocks and has no entries"),
        (None, "has no dimension of 100 blocks"),
    ],
)
def test_a_declaration_is_checked(declared: int | None, message: str) -> None:
    shape = (2, 99, 16) if declared is None else (2, 100, 16)
    with pytest.raises(BlockCountError, match=message) as caught:
        resolve_block_dim(shape, num_blocks=100, declared=declared)
    assert caught.value.remedy


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("physical", ["NHD", "HND"])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_hybrid_groups_attention_is_restrided_to_block_major(
    num_blocks: int, physical: str, kernel_blocks: int
) -> None:
    """vLLM #37236: attention and recurrent pages of one block are the same bytes, at 2 blocks and 2 heads too."""
    tokens, heads, content = 4 // kernel_blocks, 2, 3
    storage = torch.zeros(num_blocks * 2 * 4 * heads * content, dtype=torch.int16)
    shape = (2, num_blocks * kernel_blocks, tokens, heads, content)
    kv_first = storage.view(shape)
    if physical == "HND":
        kv_first = storage.view(2, num_blocks * kernel_blocks, heads, tokens, content).transpose(2, 3)
    attention = restride_block_major(kv_first, block_dim=1, kernel_blocks=kernel_blocks)
    assert attention.shape == shape
    assert attention.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    recurrent = storage.view(num_blocks, -1)
    for block in range(num_blocks):
        for kernel in range(kernel_blocks):
            attention[:, block * kernel_blocks + kernel] = block + 1
    for block in range(num_blocks):
        assert (recurrent[block] == block + 1).all()
    inner = attention.stride()[2:]
    assert inner == kv_first.stride()[2:], "tokens and heads keep the order that the kernels expect"


def test_padded_pages_keep_the_recurrent_groups_stride() -> None:
    storage = torch.zeros(3 * 40, dtype=torch.uint8)
    keys_first = storage[:48].view(2, 3, 8)
    attention = restride_block_major(keys_first, block_dim=1, page_stride_bytes=40)
    assert attention.stride() == (8, 40, 1)
    attention[:, 1] = 7
    assert storage.view(3, 40)[1, :16].eq(7).all()
    assert storage.eq(7).sum() == 16


def test_blocks_first_is_block_major_already() -> None:
    tensor = torch.zeros(3, 2, 4, 2, 8)
    assert restride_block_major(tensor, block_dim=0).stride() == tensor.stride()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_stride_bytes": 30}, StrideError, "not whole elements of 4 bytes"),
        ({"page_stride_bytes": 60}, StrideError, "blocks of 16 elements in 1 kernel blocks, 15 elements apart"),
        ({"page_stride_bytes": 144, "kernel_blocks": 2}, StrideError, "in 2 kernel blocks, 36 elements apart"),
        ({"page_stride_bytes": 80}, StorageError, "need 304 bytes of storage, there are 256"),
    ],
)
def test_pages_that_cannot_be_restrided_are_refused(
    changes: dict[str, int], error: type[GeometryError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        restride_block_major(torch.zeros(2, 4, 8), block_dim=1, **changes)
    assert caught.value.remedy


def test_strides_alone_need_no_tensor() -> None:
    assert block_major_strides((2, 5, 3), strides=(15, 3, 1), block_dim=1) == (3, 6, 1)
    assert block_major_strides((2, 5, 3), strides=(15, 3, 1), block_dim=1, page_stride=10) == (3, 10, 1)
