"""Equal weights have equal masks, and weights that cannot be read get a new mask each time."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
import torch

from kvoffload.sglang.weights import WeightMask, find_models
from tests.kit.sglang.updater import make_updater_class


class RadixAttention(torch.nn.Module):
    """A layer with the name of SGLang's layers; it has no weights of its own."""


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mixer = torch.nn.Linear(8, 8)
        self.attention = RadixAttention()


def mask_of(*models: torch.nn.Module) -> WeightMask:
    def find() -> Iterable[torch.nn.Module]:
        return models

    return WeightMask(find)


def test_equal_weights_have_equal_masks_and_others_have_others() -> None:
    one, same, other = Model(1), Model(1), Model(2)
    assert mask_of(one).take() == mask_of(same).take()
    assert len(mask_of(one).take()) == 32
    assert mask_of(one).take() != mask_of(other).take()


def test_weights_that_were_changed_in_place_have_another_mask_and_their_own_again() -> None:
    model = Model(1)
    weights = mask_of(model)
    before = weights.take()
    model.load_state_dict(Model(2).state_dict())
    assert weights.take() == mask_of(Model(2)).take() != before
    model.load_state_dict(Model(1).state_dict())
    assert weights.take() == before


def test_weights_that_change_without_a_word_are_noticed() -> None:
    model = Model(1)
    weights = mask_of(model)
    weights.take()
    assert not weights.has_changed()
    model.load_state_dict(Model(2).state_dict())
    assert weights.has_changed()
    weights.take()
    assert not weights.has_changed()
    model.mixer = torch.nn.Linear(8, 8)
    gc.collect()
    assert weights.has_changed()


@pytest.mark.parametrize("at", [(0, 0), (100, 7), (255, 255)])
def test_a_change_of_any_single_element_makes_another_mask(at: tuple[int, int]) -> None:
    model = Model(1)
    model.mixer = torch.nn.Linear(256, 256)
    weights = mask_of(model)
    before = weights.take()
    with torch.no_grad():
        model.mixer.weight[at] += 1
    assert weights.take() != before


def test_an_update_counts_as_a_change_until_it_is_proved_to_be_none() -> None:
    model = Model(1)
    weights = mask_of(model)
    before = weights.take()
    weights.updates.note()
    assert weights.has_changed()
    assert weights.is_proved_equal()
    assert not weights.has_changed()
    weights.updates.note()
    with torch.no_grad():
        model.mixer.bias[1] += 1
    assert not weights.is_proved_equal()
    assert weights.take() == mask_of(model).take() != before


def test_ranks_have_one_mask_of_the_weights_of_all_and_none_proves_anything_alone() -> None:
    asked: list[bytes] = []

    def agree(mask: bytes) -> bytes:
        asked.append(mask)
        return b"of all"

    model, other = Model(1), Model(2)
    weights = WeightMask(lambda: [model], agree=agree)
    assert [weights.take(), weights.take()] == [b"of all"] * 2
    weights.updates.note()
    assert not weights.is_proved_equal()
    assert weights.has_changed()
    invented = weights.invent(1)
    # Once for what is invented later, and once for each mask.
    assert len(asked) == 3
    assert asked[1] == asked[2]
    same = WeightMask(lambda: [other], agree=agree)
    same.updates.note()
    assert same.invent(1) == invented


def test_an_invented_mask_is_of_nothing_else_and_never_proved() -> None:
    weights = mask_of(Model(1))
    former = weights.take()
    weights.updates.note()
    invented = weights.invent(1)
    weights.updates.note()
    assert len({former, invented, weights.invent(2), mask_of(Model(1)).invent(2)}) == 4
    assert not weights.has_changed()
    weights.invent(1)
    assert weights.has_changed(), "an update began while it was made"
    weights.invent(2)
    assert not weights.is_known
    assert not weights.is_proved_equal()


def test_while_somebody_may_write_to_the_weights_they_count_as_changed() -> None:
    weights = mask_of(Model(1))
    updater = make_updater_class()()
    weights.updates.note(updater)
    weights.take()
    assert not weights.has_changed()
    updater.begin_weight_update(None)
    assert weights.has_changed()
    assert not weights.is_proved_equal()
    updater.update_weights_from_tensor(None)
    assert weights.is_proved_equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [4, 64, 1024])
def test_a_change_is_noticed_whatever_the_weights_were_loaded_from(dtype: torch.dtype, size: int) -> None:
    """Numbers of bfloat16 in a wider type have zeros in all of their low bytes."""
    model = Model(1)
    model.mixer = torch.nn.Linear(size, 2 * size).bfloat16().to(dtype)
    weights = mask_of(model)
    weights.take()
    assert not weights.has_changed()
    with torch.no_grad():
        model.mixer.weight.copy_(torch.randn(2 * size, size).bfloat16().to(dtype))
    assert weights.has_changed()


def test_weights_that_do_not_lie_one_behind_the_other_are_looked_at_where_they_lie() -> None:
    model, matrix = Model(1), torch.zeros(512, 300)
    model.mixer.weight = torch.nn.Parameter(matrix.t()[::2])
    weights = mask_of(model)
    weights.take()
    matrix[:, 1::2] += 1
    assert not weights.has_changed()
    matrix[:, ::2] += 1
    assert weights.has_changed()


def test_weights_that_are_replaced_under_their_parameter_are_noticed() -> None:
    model = Model(1)
    weights = mask_of(model)
    weights.take()
    model.mixer.weight.data = torch.randn(8, 8)
    assert weights.has_changed()


def test_weights_that_are_no_numbers_are_not_taken_for_changed_ones() -> None:
    model = Model(1)
    torch.nn.init.constant_(model.mixer.weight, torch.nan)
    weights = mask_of(model)
    weights.take()
    assert not weights.has_changed()


@pytest.mark.parametrize("make", [mask_of, lambda: mask_of(Model(1).to("meta"))])
def test_what_nobody_can_look_at_has_a_new_mask_each_time(
    make: type[WeightMask], caplog: pytest.LogCaptureFixture
) -> None:
    weights = make()
    assert len({weights.take() for _ in range(3)}) == 3
    assert caplog.text.count("cannot be looked at") == 1


def test_a_model_that_is_gone_proves_nothing() -> None:
    models = [Model(1)]
    weights = WeightMask(lambda: models)
    models.clear()
    gc.collect()
    assert weights.take() != weights.take()


def test_the_engines_model_is_the_outermost_with_its_attention() -> None:
    outer = torch.nn.Sequential(Model(1))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = find_models()
    assert any(one is outer for one in found)
    assert not any(one is other or one is outer[0] for one in found)
