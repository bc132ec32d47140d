"""Changes of weights that a sample sees, and the bound of its work."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch has no other way to see every operation

from kvoffload.engines.weight_sample import SAMPLED_ELEMENTS, pick_positions, sample_tensors

SMALL = 64
LARGE = 100_003
"""Elements: more than are sampled, and no multiple of anything."""
GOLDEN, GOLDEN_DIGEST = [23, 24, 67, 74, 116, 139], "a6ac70c48af2dc9f"


def weights(elements: int = LARGE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(7)).to(dtype)


def digest(tensor: torch.Tensor, name: str = "a.weight", **more: Any) -> bytes:
    return sample_tensors([(name, tensor)], **more).digest()


# ---- what it sees ----


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    ],
)
@pytest.mark.parametrize("elements", [1, SMALL, LARGE])
def test_equal_tensors_have_equal_samples(dtype: torch.dtype, elements: int) -> None:
    assert digest(weights(elements).to(dtype)) == digest(weights(elements).clone().to(dtype))


@pytest.mark.parametrize("elements", [1, 2, SMALL, SAMPLED_ELEMENTS, SAMPLED_ELEMENTS + 1, LARGE])
def test_one_changed_element_among_those_that_are_sampled_changes_it(elements: int) -> None:
    before = digest(weights(elements))
    for position in pick_positions(elements)[[0, elements // 3 % SAMPLED_ELEMENTS, -1]]:
        changed = weights(elements)
        changed[int(position)] += 1
        assert digest(changed) != before


def test_the_last_bit_of_an_element_counts() -> None:
    changed = weights(SMALL, torch.float32)
    changed.view(torch.int32)[5] ^= 1
    assert digest(changed) != digest(weights(SMALL, torch.float32))


def test_a_changed_stretch_of_a_large_tensor_is_seen_wherever_it_is() -> None:
    """One element of every stretch is sampled, so a change of two of them in a row touches one."""
    length = 2 * -(-LARGE // SAMPLED_ELEMENTS)
    before = digest(weights())
    for start in (0, LARGE // 2, LARGE - length):
        changed = weights()
        changed[start : start + length] += 1
        assert digest(changed) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: ("b.weight", tensor),
        lambda tensor: ("a.weight", tensor.view(torch.float16)),
        lambda tensor: ("a.weight", tensor.view(2, -1)),
        lambda tensor: ("a.weight", tensor[:-2]),
        lambda tensor: ("a.weight", tensor.flip(0)),
    ],
    ids=["name", "dtype", "shape", "length", "order"],
)
@pytest.mark.parametrize("elements", [SMALL, LARGE - 1])
def test_name_shape_and_type_are_part_of_it(change: Any, elements: int) -> None:
    assert sample_tensors([change(weights(elements))]).digest() != digest(weights(elements))


def test_tensors_that_change_places_change_it() -> None:
    one, other = weights(SMALL), weights(SMALL) + 1
    before = sample_tensors([("a", one), ("b", other)]).digest()
    assert sample_tensors([("a", other), ("b", one)]).digest() != before
    assert sample_tensors([("b", other), ("a", one)]).digest() == before


def test_a_digest_of_some_tensors_knows_nothing_of_the_others() -> None:
    sample = sample_tensors([("a", weights(SMALL)), ("b", weights(SMALL))])
    other = sample_tensors([("a", weights(SMALL)), ("b", weights(SMALL) + 1)])
    assert sample.digest(["a"]) == other.digest(["a"])
    assert sample.digest(["b"]) != other.digest(["b"])


def test_where_a_tensor_lies_does_not_matter() -> None:
    """Transposed, a part of a larger one, or with every element behind a gap: the same values in the same shape."""
    plain = weights(LARGE - 3).view(100, -1)
    wide = torch.zeros(100, 2 * plain.shape[1], dtype=plain.dtype)
    wide[:, ::2] = plain
    within = torch.cat([torch.ones(7, plain.shape[1], dtype=plain.dtype), plain])[7:]
    for other in (plain.t().contiguous().t(), wide[:, ::2], within, torch.nn.Parameter(plain)):
        assert digest(other) == digest(plain)


def test_tensors_without_elements_or_memory_are_told_apart_by_their_shape() -> None:
    assert digest(torch.empty(0)) != digest(torch.empty(0, 4))
    assert digest(torch.empty(8, device="meta")) == digest(torch.empty(8, device="meta"))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))


class Packed:
    """Shared weights as vLLM has them: no tensor itself, but a wrapper of several."""

    def __init__(self, **partitions: torch.Tensor) -> None:
        self.partitions = partitions


def test_tensors_in_tensors_are_found() -> None:
    def one(value: float) -> Any:
        return Packed(qdata=weights(SMALL), scale=torch.tensor([value]))

    assert digest(one(1.0)) == digest(one(1.0))
    assert digest(one(1.0)) != digest(one(2.0))


@pytest.mark.parametrize("tensor", [torch.eye(4).to_sparse(), torch.ones(4, dtype=torch.complex128)])
def test_what_nobody_knows_how_to_read_is_a_fault(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a tensor of"):
        digest(tensor)


def test_two_tensors_of_one_name_are_a_fault() -> None:
    with pytest.raises(ValueError, match="one name"):
        sample_tensors([("a", weights(1)), ("a", weights(2))])


def test_the_same_positions_are_sampled_in_every_process_and_version() -> None:
    """Engines whose samples differ share nothing, so another choice would cost what all of them have saved."""
    positions = pick_positions(LARGE)
    assert positions[:6].tolist() == GOLDEN
    assert sha256(positions.tobytes()).hexdigest()[:16] == GOLDEN_DIGEST


# ---- its bounds ----


@pytest.mark.parametrize("elements", [0, 1, SAMPLED_ELEMENTS, SAMPLED_ELEMENTS + 1, LARGE, 10**13])
def test_positions_are_bounded_ascending_and_one_of_each_stretch(elements: int) -> None:
    positions = pick_positions(elements)
    count = min(elements, SAMPLED_ELEMENTS)
    assert len(positions) == count
    ends = [elements * (part + 1) // count for part in range(count)]
    assert all(begin <= at < end for begin, at, end in zip([0, *ends], positions.tolist(), ends, strict=False))


class LargestResult(TorchDispatchMode):
    """The largest tensor that an operation wrote, of all that ran; views write nothing."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("is_transposed", [False, True])
def test_of_a_huge_tensor_no_more_is_read_than_of_a_large_one(is_transposed: bool) -> None:
    """It has 2 TB of address space and one page of memory behind all of it: reading all of it would never end."""
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 20, 1 << 20)
    huge, large = huge.t() if is_transposed else huge, torch.zeros(1 << 20)
    with LargestResult() as seen:
        sample = sample_tensors([("a", huge), ("b", large)])
    assert (sample.sampled, sample.elements) == (2 * SAMPLED_ELEMENTS, (1 << 40) + (1 << 20))
    assert 0 < seen.elements <= 2 * SAMPLED_ELEMENTS * 4


def test_a_limit_may_be_given() -> None:
    assert sample_tensors([("a", weights())], limit=10).sampled == 10
    assert digest(weights(), limit=10) != digest(weights(), limit=11)
