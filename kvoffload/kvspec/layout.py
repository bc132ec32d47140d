"""Layouts as data, and the block dimension by declaration (rule 2).

From vLLM #37236: `(2, num_blocks, ...)` and `(num_blocks, 2, ...)` cannot be told apart when `num_blocks` is 2, and a
hybrid model started with exactly that shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.errors import AmbiguousLayoutError, BlockCountError, GeometryError, StorageError, StrideError
from kvoffload.kvspec.placement import BLOCK, BYTE, Dim

if TYPE_CHECKING:
    import torch

LAYER = "layer"
KV = "kv"
HEAD = "head"
TOKEN = "token"
CONTENT = "content"


@dataclass(frozen=True)
class Layout:
    """Dimensions in memory order, outermost first. Without `kv`, keys and values are packed into `content`."""

    name: str
    order: tuple[str, ...]

    @property
    def is_page_contiguous(self) -> bool:
        """Whether a block of a layer is one run of bytes."""
        return set(self.order[:2]) == {LAYER, BLOCK}

    @property
    def is_block_outermost(self) -> bool:
        return self.order[0] == BLOCK


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        # vLLM since 0.30: every layer is [B, H, N, C], the layout is a permutation of [L, B, H, N, C].
        Layout("LBHNC", (LAYER, BLOCK, HEAD, TOKEN, CONTENT)),
        Layout("LBNHC", (LAYER, BLOCK, TOKEN, HEAD, CONTENT)),
        Layout("LHBNC", (LAYER, HEAD, BLOCK, TOKEN, CONTENT)),
        Layout("BLHNC", (BLOCK, LAYER, HEAD, TOKEN, CONTENT)),
        Layout("BLNHC", (BLOCK, LAYER, TOKEN, HEAD, CONTENT)),
        Layout("BHLNC", (BLOCK, HEAD, LAYER, TOKEN, CONTENT)),
        # Before it, and in other engines: keys and values have a dimension, each layer a tensor.
        Layout("KV_BLOCK_NHD", (LAYER, KV, BLOCK, TOKEN, HEAD, CONTENT)),
        Layout("KV_BLOCK_HND", (LAYER, KV, BLOCK, HEAD, TOKEN, CONTENT)),
        Layout("BLOCK_KV_NHD", (LAYER, BLOCK, KV, TOKEN, HEAD, CONTENT)),
        Layout("BLOCK_KV_HND", (LAYER, BLOCK, KV, HEAD, TOKEN, CONTENT)),
    )
}


def find_layout(name: str) -> Layout:
    layout = LAYOUTS.get(name)
    if layout is None:
        raise GeometryError(f"layout {name!r} is unknown", remedy=f"use one of {', '.join(LAYOUTS)}", layout=name)
    return layout


def tensor_dims(
    names: Sequence[str], *, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[Dim, ...]:
    """Dimensions from a tensor's declared names and its shape and strides in elements (as torch counts them)."""
    if not len(names) == len(shape) == len(strides):
        raise GeometryError(
            f"{len(names)} names, {len(shape)} sizes, {len(strides)} strides", remedy="name every dimension once"
        )
    dims = [Dim(name, size, stride * itemsize) for name, size, stride in zip(names, shape, strides, strict=True)]
    return (*dims, Dim(BYTE, itemsize, 1))


def resolve_block_dim(
    shape: Sequence[int], *, num_blocks: int, kernel_blocks: int = 1, declared: int | None = None
) -> int:
    """Finds the dimension that counts blocks. A declaration wins and is checked; without one only a single reading is
    accepted.

    AmbiguousLayoutError spells out every reading; BlockCountError if there is none, or the declared one is wrong.
    """
    entries = num_blocks * kernel_blocks
    shown = tuple(shape)
    if declared is not None:
        if not 0 <= declared < len(shown) or shown[declared] != entries:
            actual = shown[declared] if 0 <= declared < len(shown) else "no"
            raise BlockCountError(
                f"shape {shown}: dimension {declared} is declared to count blocks and has {actual} entries, "
                f"expected {num_blocks} blocks x {kernel_blocks} kernel blocks = {entries}",
                remedy="correct the declared dimension, or allocate the tensor for the configured num_blocks",
                shape=shown,
            )
        return declared
    readings = [index for index, size in enumerate(shown) if size == entries]
    if not readings:
        raise BlockCountError(
            f"shape {shown} has no dimension of {num_blocks} blocks x {kernel_blocks} kernel blocks = {entries}",
            remedy="num_blocks comes from the engine's configuration; allocate the tensor for it",
            shape=shown,
        )
    if len(readings) > 1:
        spelled = " or ".join(_spell(shown, index) for index in readings)
        raise AmbiguousLayoutError(
            f"shape {shown} with {num_blocks} blocks can be read as {spelled}",
            remedy="declare the block dimension; a shape alone does not tell",
            shape=shown,
            readings=tuple(readings),
        )
    return readings[0]


def block_major_strides(
    shape: Sequence[int],
    *,
    strides: Sequence[int],
    block_dim: int,
    page_stride: int | None = None,
    kernel_blocks: int = 1,
) -> tuple[int, ...]:
    """Strides (in the unit of `strides`) with the block dimension outermost and the others in the order they had.

    `page_stride` is the distance of two blocks in memory shared with another group; by default pages are dense.
    """
    others = sorted((index for index in range(len(shape)) if index != block_dim), key=lambda i: (strides[i], -i))
    result = [0] * len(shape)
    step = 1
    for index in others:
        result[index] = step
        step *= shape[index]
    page = step * kernel_blocks
    if page_stride is not None and (page_stride < page or (kernel_blocks > 1 and page_stride != page)):
        raise StrideError(
            f"shape {tuple(shape)}: blocks of {page} elements in {kernel_blocks} kernel blocks, "
            f"{page_stride} elements apart",
            remedy="kernel blocks smaller than blocks need pages without padding, and a page fits its stride",
        )
    result[block_dim] = step if page_stride is None else page_stride // kernel_blocks
    return tuple(result)


def restride_block_major(
    tensor: torch.Tensor, *, block_dim: int, page_stride_bytes: int | None = None, kernel_blocks: int = 1
) -> torch.Tensor:
    """A view of the same shape in which one block's bytes are together, as a recurrent group's pages are.

    A hybrid model's attention and recurrent groups share pages: with `(2, blocks, ...)` strides a block's keys and
    values would lie in the pages of two other blocks (vLLM #37236). The numbers in memory are not moved, so this is for
    a cache that has not been written yet. `block_dim` is the backend's declaration; at 0 only padding may change.
    """
    itemsize = int(tensor.element_size())
    if page_stride_bytes is not None and page_stride_bytes % itemsize:
        raise StrideError(
            f"pages {page_stride_bytes} bytes apart are not whole elements of {itemsize} bytes",
            remedy="correct the declared block stride",
        )
    strides = block_major_strides(
        tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        block_dim=block_dim,
        page_stride=None if page_stride_bytes is None else page_stride_bytes // itemsize,
        kernel_blocks=kernel_blocks,
    )
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    needed = (int(tensor.storage_offset()) + last + 1) * itemsize
    if needed > int(tensor.untyped_storage().nbytes()):
        raise StorageError(
            f"block-major pages of shape {tuple(tensor.shape)} need {needed} bytes of storage, "
            f"there are {int(tensor.untyped_storage().nbytes())}",
            remedy="allocate blocks times the shared page stride",
        )
    return tensor.as_strided(tuple(tensor.shape), strides, tensor.storage_offset())


def _spell(shape: tuple[int, ...], block_dim: int) -> str:
    parts = ["blocks" if index == block_dim else str(size) for index, size in enumerate(shape)]
    return f"({', '.join(parts)}), dimension {block_dim}"
