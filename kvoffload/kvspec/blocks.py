"""The number of blocks comes from the configuration (rule 1); a tensor is checked against it, never read for it.

From vLLM #38554: with per-layer page sizes a tensor's first dimension is not the number of blocks, and offloading that
read it there addressed the wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.errors import BlockCountError, StorageError, StrideError
from kvoffload.kvspec.placement import BLOCK, BYTE, Allocation, Dim, Placement

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Address, size and shape of a tensor, in bytes, without a reference to the tensor."""

    name: str
    address: int
    storage_address: int
    storage_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def read_facts(name: str, tensor: torch.Tensor) -> TensorFacts:
    storage = tensor.untyped_storage()
    itemsize = int(tensor.element_size())
    return TensorFacts(
        name=name,
        address=int(tensor.data_ptr()),
        storage_address=int(storage.data_ptr()),
        storage_bytes=int(storage.nbytes()),
        shape=tuple(int(size) for size in tensor.shape),
        strides=tuple(int(stride) * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
    )


def check_num_blocks(num_blocks: object) -> int:
    """The configured count, or BlockCountError."""
    if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
        raise BlockCountError(
            f"num_blocks is {num_blocks!r}",
            remedy="give the number of blocks that the engine's configuration states, at least 1",
            num_blocks=num_blocks,
        )
    return num_blocks


def check_storage(facts: TensorFacts, allocation: Allocation) -> None:
    """The storage behind a tensor is the declared allocation, neither shorter nor longer (but for its slack)."""
    longest = allocation.size_bytes + allocation.slack_bytes
    if not allocation.size_bytes <= facts.storage_bytes <= longest:
        word = "only " if facts.storage_bytes < allocation.size_bytes else ""
        raise StorageError(
            f"tensor {facts.name}: its storage has {word}{facts.storage_bytes} bytes, allocation {allocation.name} is "
            f"declared with {allocation.size_bytes}",
            remedy="num_blocks and page sizes of the configuration are not those that the tensor was made for",
            tensor=facts.name,
            allocation=allocation.name,
        )


def check_tensor(facts: TensorFacts, placement: Placement, *, num_blocks: int, allocation_address: int) -> None:
    """A tensor lies where its placement says, with the declared count of blocks and the declared strides.

    Whatever a tensor looks like, the placement stays what is used; this only refuses what contradicts it.
    """
    if placement.block_dim is None:
        _check_address(facts, expected=allocation_address, placement=placement)
        return
    _check_address(facts, expected=allocation_address + placement.offset, placement=placement)
    if placement.block_dim >= len(facts.shape):
        raise BlockCountError(
            f"tensor {facts.name} of shape {facts.shape} has no dimension {placement.block_dim}, "
            f"which is declared to count blocks",
            remedy="correct the declared block dimension",
            tensor=facts.name,
        )
    entries, expected = facts.shape[placement.block_dim], num_blocks * placement.kernel_blocks
    if entries != expected:
        raise BlockCountError(
            f"tensor {facts.name} of shape {facts.shape}: dimension {placement.block_dim} has {entries} entries, "
            f"expected {num_blocks} blocks x {placement.kernel_blocks} kernel blocks = {expected}",
            remedy="num_blocks comes from the engine's configuration; allocate the tensor for it",
            tensor=facts.name,
            num_blocks=num_blocks,
        )
    stride, declared = facts.strides[placement.block_dim] * placement.kernel_blocks, placement.runs[0].stride
    if stride != declared and entries > 1:
        raise StrideError(
            f"tensor {facts.name}: blocks are {stride} bytes apart, declared are {declared}",
            remedy="correct the declared block stride, or the block dimension it belongs to",
            tensor=facts.name,
        )
    _check_inner(facts, placement)


def _check_inner(facts: TensorFacts, placement: Placement) -> None:
    """Inside a block the tensor covers the declared bytes in the declared order of strides."""
    actual = [
        Dim(str(index), size, stride)
        for index, (size, stride) in enumerate(zip(facts.shape, facts.strides, strict=True))
        if index != placement.block_dim
    ]
    actual.append(Dim(BYTE, facts.itemsize, 1))
    if placement.dims:
        declared = [dim for dim in placement.dims if dim.name != BLOCK]
    else:
        declared = [Dim(BYTE, placement.bytes_per_block // placement.kernel_blocks, 1)]
    if _footprint(actual) != _footprint(declared):
        raise StrideError(
            f"tensor {facts.name}: inside a block it has (size, stride in bytes) {_footprint(actual)}, "
            f"declared is {_footprint(declared)}",
            remedy="declare the layout that the engine really uses",
            tensor=facts.name,
        )


def _footprint(dims: Iterable[Dim]) -> list[tuple[int, int]]:
    """Sizes and strides with dense neighbours merged: equal for the same bytes whatever the element type."""
    merged: list[tuple[int, int]] = []
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: dim.stride):
        if merged and dim.stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * dim.size, merged[-1][1])
        else:
            merged.append((dim.size, dim.stride))
    return merged


def _check_address(facts: TensorFacts, *, expected: int, placement: Placement) -> None:
    if facts.address != expected:
        raise StrideError(
            f"tensor {facts.name} starts {facts.address - expected:+d} bytes from where allocation "
            f"{placement.allocation} has {placement.label}",
            remedy="correct the declared offset, or the allocation the tensor belongs to",
            tensor=facts.name,
        )
