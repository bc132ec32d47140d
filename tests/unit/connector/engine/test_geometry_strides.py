"""The block dimension is declared, and pages lie as declared: vLLM #37236 on tensors that it might hand out.

A tensor of two blocks, two heads and two tokens a block has a shape that says nothing.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvoffload.errors import BlockCountError, StrideError
from tests.kit.connector.engine_configs import TOKEN_BYTES, full, make_config, make_tensors
from tests.kit.connector.registered import Tensors, contradict, describe, register

TWO = 2


def see_through(tensor: torch.Tensor, *order: int) -> torch.Tensor:
    """The same shape over the same bytes, with its dimensions packed in this order, outermost first."""
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def ambiguous_engine() -> tuple[KVCacheConfig, Tensors]:
    config = make_config((["a"], full(TWO)), num_blocks=TWO)
    tensors = make_tensors(config)
    assert tuple(tensors["a"].shape)[:3] == (TWO, TWO, TWO)
    return config, tensors


def test_pages_seen_through_other_strides_are_the_same_pages() -> None:
    config, tensors = ambiguous_engine()
    plain = describe(config, tensors)
    tensors["a"] = see_through(tensors["a"], 0, 2, 1, 3)
    geometry = describe(config, tensors)
    assert geometry.placements[0].runs == plain.placements[0].runs
    register(geometry, tensors)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_pages_that_are_not_in_one_piece_are_refused_whatever_the_shape_could_mean(order: tuple[int, ...]) -> None:
    config, tensors = ambiguous_engine()
    tensors["a"] = see_through(tensors["a"], *order)
    with pytest.raises(StrideError, match="tensor a: blocks are"):
        register(describe(config, tensors), tensors)


def test_keys_and_values_in_a_dimension_of_their_own_are_refused_by_name() -> None:
    config, tensors = ambiguous_engine()
    tensors["a"] = tensors["a"].unflatten(-1, (2, -1)).permute(3, 0, 1, 2, 4)
    with pytest.raises(StrideError, match=r"layer a: its tensor has the shape \(2, 2, 2, 2, 8\)"):
        describe(config, tensors)


def test_pages_closer_than_they_are_long_are_refused_by_name() -> None:
    config, tensors = ambiguous_engine()
    with pytest.raises(StrideError, match=r"layer a: .* elements apart"):
        describe(contradict(config, block_stride=TWO * TOKEN_BYTES // 2), tensors)


@pytest.mark.parametrize("entries", [11, 13])
def test_kernel_blocks_that_make_no_whole_blocks_are_refused_by_name(entries: int) -> None:
    config = make_config((["a"], full(8)), num_blocks=3)
    tensors = make_tensors(config, kernel_block_sizes=[2])
    tensors["a"] = torch.zeros((entries, *tensors["a"].shape[1:]), dtype=tensors["a"].dtype)
    with pytest.raises(BlockCountError, match=f"layer a: .* has {entries} entries.*= 12"):
        describe(config, tensors)
