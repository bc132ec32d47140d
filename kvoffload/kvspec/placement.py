"""Where one part of one layer lies: strided runs in an allocation, from the engine's declaration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from kvoffload.errors import BlockCountError, GeometryError, StorageError, StrideError
from kvoffload.kvspec.spec import LayerSpec

BLOCK = "block"
BYTE = "byte"
MAX_RUNS = 1 << 16
"""Runs per block of one part. More means that a layout has no contiguous bytes to speak of; copying it is hopeless."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One piece of engine memory that holds nothing but KV cache.

    `slack_bytes`: how much longer than `size_bytes` its storage may be (an allocator's rounding). Beyond that a longer
    storage is an error: a count of blocks that is too small would otherwise go unnoticed.
    """

    name: str
    size_bytes: int
    slack_bytes: int = 0

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.slack_bytes < 0:
            raise StorageError(
                f"allocation {self.name}: {self.size_bytes} bytes, slack {self.slack_bytes}",
                remedy="leave empty allocations out",
                allocation=self.name,
            )


class Run(NamedTuple):
    """Block b occupies [base + b * stride, + length) of the allocation."""

    allocation: str
    base: int
    stride: int
    length: int


class Dim(NamedTuple):
    """One named dimension of a declared tensor, its stride in bytes."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One part of one layer. Its runs, in this order, are what a record holds of a block."""

    layer: str
    part: str
    tensor: str
    """The name under which the engine hands the tensor to `Registration`."""
    offset: int
    """First byte of the tensor in the allocation."""
    runs: tuple[Run, ...]
    padding: tuple[Run, ...] = ()
    """Bytes of each block's slot that the engine declares to be unused."""
    block_dim: int | None = 0
    """Number of the tensor's dimension that counts blocks; None: the tensor is the bare allocation."""
    kernel_blocks: int = 1
    """Entries of that dimension per block."""
    dims: tuple[Dim, ...] = ()
    """All dimensions as declared, in any order; empty: each block is one run of bytes."""
    order: tuple[tuple[str, int], ...] = ()
    """How a page's numbers follow each other in memory, outermost first: part of the cache's identity."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise GeometryError(f"layer {self.layer}, part {self.part}: no runs", remedy="place it or exclude it")
        for run in (*self.runs, *self.padding):
            if run.length < 1 or run.base < 0:
                raise StrideError(f"{self.label}: run {run}", remedy="lengths are positive, bases not negative")
            if run.stride < run.length:
                raise StrideError(
                    f"{self.label}: blocks of {run.length} bytes are {run.stride} bytes apart",
                    remedy="a block's stride is at least its bytes; check which dimension counts blocks",
                    layer=self.layer,
                )

    @property
    def label(self) -> str:
        return f"layer {self.layer}, part {self.part}"

    @property
    def allocation(self) -> str:
        return self.runs[0].allocation

    @property
    def bytes_per_block(self) -> int:
        return sum(run.length for run in self.runs)


def place_strided(
    layer: LayerSpec,
    *,
    allocation: str,
    block_stride: int,
    offset: int = 0,
    layer_stride: int = 0,
    layer_index: int = 0,
    slot_bytes: int | None = None,
    part: str | None = None,
    tensor: str | None = None,
    kernel_blocks: int = 1,
    order: Sequence[tuple[str, int]] = (),
    block_dim: int | None = 0,
) -> Placement:
    """A page that is one run: block b starts at `offset + layer_index * layer_stride + b * block_stride`.

    `slot_bytes` is what the engine reserves per block for this page; what exceeds the page is declared padding. Without
    it nothing is declared, and a gap after the page is a hole. `order` describes the numbers inside the page if known.
    """
    part = part or layer.main_part
    length = layer.bytes_of(part)
    base = offset + layer_index * layer_stride
    if kernel_blocks < 1 or length % kernel_blocks:
        raise BlockCountError(
            f"layer {layer.name}: a page of {length} bytes is not {kernel_blocks} equal kernel blocks",
            remedy="the kernel's block size must divide the group's",
            layer=layer.name,
        )
    if kernel_blocks > 1 and block_stride != length:
        raise StrideError(
            f"layer {layer.name}: {kernel_blocks} kernel blocks per block, but blocks of {length} bytes are "
            f"{block_stride} bytes apart",
            remedy="kernel blocks smaller than blocks need blocks without gaps: use a layer-compact layout",
            layer=layer.name,
        )
    split = (("kernel", kernel_blocks),) if kernel_blocks > 1 else ()
    return Placement(
        layer=layer.name,
        part=part,
        tensor=tensor or tensor_name(layer, part),
        offset=base,
        runs=(Run(allocation, base, block_stride, length),),
        padding=_slot_padding(Run(allocation, base, block_stride, length), slot_bytes, layer=layer.name),
        block_dim=block_dim,
        kernel_blocks=kernel_blocks,
        order=(*split, *(tuple(order) or ((BYTE, length // kernel_blocks),))),
    )


def place_dims(
    layer: LayerSpec,
    *,
    allocation: str,
    dims: Iterable[Dim | tuple[str, int, int]],
    num_blocks: int,
    offset: int = 0,
    slot_bytes: int | None = None,
    part: str | None = None,
    tensor: str | None = None,
    tensor_block_dim: int | None = None,
) -> Placement:
    """A page from declared dimensions, strides in bytes, a `byte` dimension of stride 1 among them.

    The dimension named `block` counts blocks; it is never found by its size. The layer's declared bytes say how many
    entries of it make one block (kernel blocks smaller than blocks), and its size must be that many times `num_blocks`.
    `dims` come in the order of the tensor's own; if not, `tensor_block_dim` says which of the tensor's counts blocks.
    """
    part = part or layer.main_part
    declared = tuple(Dim(*dim) for dim in dims)
    block, inner = _split_block_dim(declared, layer=layer.name)
    kernel_blocks = _count_kernel_blocks(layer, part, inner=inner, block=block, num_blocks=num_blocks)
    if kernel_blocks > 1:
        inner = (Dim("kernel", kernel_blocks, block.stride), *inner)
    shifts, length, order = find_runs(inner, label=f"layer {layer.name}, part {part}")
    # With one block the stride is never used, and torch reports any number for a dimension of size 1.
    stride = block.stride * kernel_blocks if num_blocks > 1 else max(block.stride * kernel_blocks, length)
    runs = tuple(Run(allocation, offset + shift, stride, length) for shift in shifts)
    if slot_bytes is not None and len(runs) > 1:
        raise GeometryError(
            f"layer {layer.name}, part {part}: slot_bytes with a page of {len(runs)} runs",
            remedy="declare the padding of pages that are not contiguous as Padding of the geometry",
            layer=layer.name,
        )
    return Placement(
        layer=layer.name,
        part=part,
        tensor=tensor or tensor_name(layer, part),
        offset=offset,
        runs=runs,
        padding=_slot_padding(runs[0], slot_bytes, layer=layer.name),
        block_dim=declared.index(block) if tensor_block_dim is None else tensor_block_dim,
        kernel_blocks=kernel_blocks,
        dims=declared,
        order=order,
    )


def find_runs(dims: Sequence[Dim], *, label: str) -> tuple[list[int], int, tuple[tuple[str, int], ...]]:
    """Stride analysis of one block: (start of every run, bytes of a run, order of the dimensions in memory).

    Dense inner dimensions merge into the run, the others are enumerated, outermost slowest.
    """
    inward = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: dim.stride)
    length, merged = 1, 0
    for dim in inward:
        if dim.stride != length:
            break
        length *= dim.size
        merged += 1
    if length == 1 and inward:
        raise StrideError(
            f"{label}: no dimension has a stride of 1 byte: {_show(dims)}",
            remedy="declare strides in bytes, with a dimension of the element's bytes",
        )
    outward = inward[merged:][::-1]
    if prod(dim.size for dim in outward) > MAX_RUNS:
        raise StrideError(
            f"{label}: a block would be more than {MAX_RUNS} pieces of {length} bytes: {_show(dims)}",
            remedy="use a layout that keeps a head's or a token's bytes together",
        )
    steps = [range(0, dim.size * dim.stride, dim.stride) for dim in outward]
    shifts = [sum(step) for step in product(*steps)]
    return shifts, length, tuple((dim.name, dim.size) for dim in reversed(inward))


def tensor_name(layer: LayerSpec, part: str) -> str:
    """The layer's own name for its page, `<layer>.<part>` for whatever lies apart from it."""
    return layer.name if part == layer.main_part else f"{layer.name}.{part}"


def _split_block_dim(dims: tuple[Dim, ...], *, layer: str) -> tuple[Dim, tuple[Dim, ...]]:
    blocks = [dim for dim in dims if dim.name == BLOCK]
    if len(blocks) != 1:
        raise GeometryError(
            f"layer {layer}: {len(blocks)} dimensions are named block in {_show(dims)}",
            remedy="name exactly one dimension block",
            layer=layer,
        )
    for dim in dims:
        if dim.size < 1 or (dim.stride < 1 and dim.size > 1):
            raise StrideError(
                f"layer {layer}: dimension {dim.name} has size {dim.size}, stride {dim.stride}",
                remedy="sizes and strides are positive",
                layer=layer,
            )
    return blocks[0], tuple(dim for dim in dims if dim.name != BLOCK)


def _count_kernel_blocks(layer: LayerSpec, part: str, *, inner: tuple[Dim, ...], block: Dim, num_blocks: int) -> int:
    """How many entries of the block dimension make one block: by the layer's bytes, never by the tensor's shape."""
    page, entry = layer.bytes_of(part), prod(dim.size for dim in inner)
    if page % entry:
        raise StrideError(
            f"layer {layer.name}, part {part}: {page} bytes per block, but an entry of the block dimension has {entry}",
            remedy="the declared dimensions and the layer's page bytes contradict each other; correct one",
            layer=layer.name,
        )
    kernel_blocks = page // entry
    if num_blocks < 1 or block.size != num_blocks * kernel_blocks:
        raise BlockCountError(
            f"layer {layer.name}, part {part}: the block dimension has {block.size} entries, expected "
            f"{num_blocks} blocks of {kernel_blocks}",
            remedy="num_blocks comes from the engine's configuration; allocate the tensor for it",
            layer=layer.name,
        )
    return kernel_blocks


def _slot_padding(run: Run, slot_bytes: int | None, *, layer: str) -> tuple[Run, ...]:
    if slot_bytes is None or slot_bytes == run.length:
        return ()
    if slot_bytes < run.length or slot_bytes > run.stride:
        raise StrideError(
            f"layer {layer}: a slot of {slot_bytes} bytes for a page of {run.length} every {run.stride} bytes",
            remedy="a slot is at least its page and at most the block stride",
            layer=layer,
        )
    return (Run(run.allocation, run.base + run.length, run.stride, slot_bytes - run.length),)


def _show(dims: Sequence[Dim]) -> str:
    return ", ".join(f"{dim.name} {dim.size} x {dim.stride} B" for dim in dims)
