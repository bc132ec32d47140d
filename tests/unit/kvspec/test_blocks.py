"""Rule 1: blocks are counted by the configuration; tensors are checked against it, never read for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvoffload.errors import BlockCountError, GeometryError, StorageError, StrideError
from kvoffload.kvspec import (
    Allocation,
    GroupSpec,
    KVGeometry,
    Placement,
    TensorFacts,
    build_page_map,
    check_num_blocks,
    check_storage,
    check_tensor,
    place_dims,
    place_strided,
    prove_complete,
    read_facts,
)
from tests.kit.kvspec.builders import attention

LAYER = attention("l")


def strided(**changes: object) -> Placement:
    return place_strided(LAYER, allocation="kv", block_stride=64, **changes)  # type: ignore[arg-type]


def check(tensor: torch.Tensor, placement: Placement, *, num_blocks: int = 3) -> None:
    facts = read_facts("l", tensor)
    check_tensor(facts, placement, num_blocks=num_blocks, allocation_address=facts.storage_address)


def test_num_blocks_comes_from_the_configuration() -> None:
    """vLLM #38554: with per-layer page sizes, the tensors' first dimensions don't say how many blocks there are.

    The second layer's kernel uses blocks of one token, so its tensor has twice as many entries. A count that is read
    from a shape is wrong for one of the two layers; the configured one is right for both.
    """
    small, large = attention("small"), attention("large", head_size=8)
    storage = torch.zeros(3 * (64 + 128), dtype=torch.uint8)
    views = {"small": storage[: 3 * 64].view(3, 64), "large": storage[3 * 64 :].view(6, 64)}
    geometry = KVGeometry(
        num_blocks=3,
        hash_block_size=2,
        groups=(GroupSpec(name="uniform type", layers=(small, large), block_size=2),),
        allocations=(Allocation(name="kv", size_bytes=storage.numel()),),
        placements=(
            place_strided(small, allocation="kv", block_stride=64),
            place_strided(large, allocation="kv", offset=3 * 64, block_stride=128, kernel_blocks=2),
        ),
    )
    assert {view.shape[0] for view in views.values()} == {3, 6}
    for placement in geometry.placements:
        facts = read_facts(placement.tensor, views[placement.tensor])
        check_tensor(facts, placement, num_blocks=3, allocation_address=storage.data_ptr())
    prove_complete(geometry)
    runs = build_page_map(geometry).block_runs(0, 2)
    assert [(run.start, run.length) for run in runs] == [(2 * 64, 64), (3 * 64 + 2 * 128, 128)]


@pytest.mark.parametrize("wrong", [2, 4, 6])
def test_a_wrong_configured_count_is_noticed(wrong: int) -> None:
    """Left open in vLLM #38554: a tensor that was made for another count."""
    storage = torch.zeros(wrong * 64, dtype=torch.uint8)
    with pytest.raises(BlockCountError, match=f"dimension 0 has {wrong} entries, expected 3 blocks x 1 kernel blocks"):
        check(storage.view(wrong, 64), strided())
    with pytest.raises(StorageError, match=f"{wrong * 64} bytes, allocation kv is declared with 192"):
        check_storage(read_facts("l", storage), Allocation(name="kv", size_bytes=192))


@pytest.mark.parametrize("num_blocks", [0, -1, None, True, 2.0, "3"])
def test_zero_blocks_are_refused(num_blocks: object) -> None:
    with pytest.raises(BlockCountError, match="num_blocks is") as caught:
        check_num_blocks(num_blocks)
    assert "configuration" in caught.value.remedy


@pytest.mark.parametrize(
    ("extra", "slack", "ok"), [(0, 0, True), (4, 0, False), (4, 4, True), (5, 4, False), (-1, 4, False)]
)
def test_a_storage_is_as_long_as_declared(extra: int, slack: int, ok: bool) -> None:
    facts = read_facts("l", torch.zeros(192 + extra, dtype=torch.uint8))
    allocation = Allocation(name="kv", size_bytes=192, slack_bytes=slack)
    if ok:
        check_storage(facts, allocation)
        return
    with pytest.raises(StorageError) as caught:
        check_storage(facts, allocation)
    assert caught.value.remedy


def test_facts_are_in_bytes() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)[1:, ::2]
    facts = read_facts("t", tensor)
    assert facts == TensorFacts(
        name="t",
        address=facts.storage_address + 12,
        storage_address=tensor.untyped_storage().data_ptr(),
        storage_bytes=48,
        shape=(3, 3),
        strides=(12, 4),
        itemsize=2,
    )


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.uint8, (3, 64)), (torch.bfloat16, (3, 2, 2, 8)), (torch.float32, (3, 1, 16)), (torch.int8, (3, 1, 1, 64))],
)
def test_the_element_type_does_not_matter(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(torch.zeros(192, dtype=torch.uint8).view(dtype).view(shape), strided())


def test_the_bare_allocation_may_stand_for_a_layer() -> None:
    """Some of vLLM's specs have no view per layer: the engine hands out the whole buffer."""
    placement = replace(strided(offset=64), block_dim=None)
    storage = torch.zeros(256, dtype=torch.uint8)
    check(storage, placement)
    with pytest.raises(StrideError, match=r"starts \+64 bytes from where"):
        check(storage[64:], placement)


@pytest.mark.parametrize(
    ("view", "error", "message"),
    [
        (lambda flat: flat[:192].view(3, 64), StrideError, "starts -64 bytes from where allocation kv has layer l"),
        (lambda flat: flat[64:256].view(64, 3).t(), StrideError, "blocks are 1 bytes apart, declared are 64"),
        (lambda flat: flat[64:256].view(192), BlockCountError, "dimension 0 has 192 entries"),
        (lambda flat: flat[64:448].view(3, 128)[:, ::2], StrideError, "blocks are 128 bytes apart, declared are 64"),
        (lambda flat: flat[64:256].view(3, 64)[:, :32], StrideError, "inside a block it has"),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_refused(view: object, error: type[GeometryError], message: str) -> None:
    assert callable(view)
    tensor = view(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(error, match=message) as caught:
        check(tensor, strided(offset=64))
    assert caught.value.remedy


def test_a_declared_block_dimension_that_a_tensor_lacks_is_refused() -> None:
    with pytest.raises(BlockCountError, match="has no dimension 4, which is declared to count blocks"):
        check(torch.zeros(3, 64, dtype=torch.uint8), strided(block_dim=4))


@pytest.mark.parametrize("num_blocks", [2, 3, 64])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_declared_dimensions_are_compared_by_stride_not_by_shape(num_blocks: int, kernel_blocks: int) -> None:
    """(2, blocks, ...) and (blocks, 2, ...) of two blocks have one shape; their strides differ and must fit."""
    entries, half = num_blocks * kernel_blocks, 32 // kernel_blocks
    kv_first = (("kv", 2, entries * half), ("block", entries, half), ("byte", half, 1))
    block_first = (("kv", 2, half), ("block", entries, 2 * half), ("byte", half, 1))
    flat = torch.zeros(num_blocks * 64, dtype=torch.uint8)
    tensors = {
        kv_first: flat.view(2, entries, half),
        block_first: flat.view(entries, 2, half).transpose(0, 1),
    }
    for declared in tensors:
        placement = place_dims(LAYER, allocation="kv", dims=declared, num_blocks=num_blocks)
        for dims, tensor in tensors.items():
            if dims is declared:
                check(tensor, placement, num_blocks=num_blocks)
            else:
                with pytest.raises(StrideError):
                    check(tensor, placement, num_blocks=num_blocks)
