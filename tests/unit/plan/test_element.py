"""Types as vLLM names them, and the scales of their numbers."""

from __future__ import annotations

import pytest

from kvoffload.errors import ConfigError
from kvoffload.plan.element import find_element


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("auto", 256),
        ("float32", 512),
        ("float16", 256),
        ("fp8", 128),
        ("fp8_e5m2", 128),
        ("int8_per_token_head", 132),
        ("fp8_per_token_head", 132),
        ("int4_per_token_head", 68),
    ],
)
def test_a_row_of_128_numbers_takes(name: str, row_bytes: int) -> None:
    assert find_element(name, of_model="bfloat16", setting="kv-dtype").row_bytes(128) == row_bytes


def test_what_is_not_known_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="kv-dtype 'fp9' is not known; allowed are auto, float32"):
        find_element("fp9", of_model="bfloat16", setting="kv-dtype")
    with pytest.raises(ConfigError, match="state-dtype 'fp8' is not known; allowed are auto, float32"):
        find_element("fp8", of_model="bfloat16", setting="state-dtype")
    with pytest.raises(ConfigError, match="kv-dtype '' is not known"):
        find_element("auto", of_model="", setting="kv-dtype")
    with pytest.raises(ConfigError, match="3 numbers of int4_per_token_head are no whole bytes"):
        find_element("int4_per_token_head", of_model="", setting="kv-dtype").row_bytes(3)
