"""What a config leaves to its class in transformers."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.plan import completed
from kvoffload.plan.completed import complete_config
from tests.kit.plan.configs import PUBLISHED


def test_a_class_says_which_layer_is_what() -> None:
    found = complete_config(PUBLISHED["Gemma-2-9B"].config)
    assert found is not None
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 21


def test_of_a_model_that_sees_it_is_the_text_part_with_the_models_type() -> None:
    found = complete_config(PUBLISHED["Gemma-3-4B"].config)
    assert found is not None
    assert (found["model_type"], found["num_key_value_heads"], found["dtype"]) == ("gemma3_text", 4, "bfloat16")


def test_what_the_config_says_stays() -> None:
    found = complete_config(PUBLISHED["Gemma-2-9B"].config | {"layer_types": ["full_attention"] * 42})
    assert found is not None
    assert found["layer_types"] == ["full_attention"] * 42


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "kimi_linear_of_mine"}, {"model_type": 3}, {"model_type": "gemma2", "head_dim": "x"}]
)
def test_what_is_not_known_or_makes_no_sense_is_not_completed(config: dict[str, Any]) -> None:
    assert complete_config(config) is None


def test_without_transformers_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed, "find_spec", lambda _: None)
    assert complete_config(PUBLISHED["Gemma-2-9B"].config) is None
