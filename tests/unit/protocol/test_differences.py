"""In what two identities differ is told in words, and only settings that users chose make two engines a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.protocol import IdentityField, Register
from kvoffload.protocol.differences import describe_pair, differ_by_setting, tell_differences
from tests.kit.cache.cache_model import HYBRID, PLAIN
from tests.kit.server.harness import register_of

DIGEST, OTHER_DIGEST = "0a" * 32, "0b" * 32
PARTS = {
    "engine": "vllm 0.33.0",
    "model": "Qwen3",
    "revision": DIGEST,
    "model_config": DIGEST,
    "model_dtype": "bfloat16",
    "weights": DIGEST,
    "layers": DIGEST,
    "geometry": DIGEST,
    "parallel": DIGEST,
    "salt": DIGEST,
    "kv_dtype": "bfloat16",
    "layout": "NHD",
    "parallel_shape": "one rank",
}


def told(hash_block_size: int = 64, **changes: str) -> Register:
    """Returns an engine's registration, whose parts are those above but for the changes."""
    parts = tuple(IdentityField(name=name, value=value) for name, value in {**PARTS, **changes}.items())
    return register_of(replace(PLAIN, hash_block_size=hash_block_size), identity=parts)


def test_another_block_size_is_told_with_both_values_and_without_the_digest_that_it_changes() -> None:
    one, other = told(64), told(128, geometry=OTHER_DIGEST, layers=OTHER_DIGEST, kv_dtype="fp8_e4m3")
    assert [(each.name, each.ours, each.theirs) for each in tell_differences(one, other)] == [
        ("hash_block_tokens", "64", "128"),
        ("kv_dtype", "bfloat16", "fp8_e4m3"),
    ]
    assert describe_pair(one, other) == "Qwen3: hash_block_tokens 64 and 128, kv_dtype bfloat16 and fp8_e4m3"


def test_a_secret_is_told_by_its_name_alone() -> None:
    assert describe_pair(told(), told(salt=OTHER_DIGEST)) == "Qwen3: salt"


def test_groups_are_told_where_nothing_else_differs() -> None:
    [found] = tell_differences(register_of(PLAIN), register_of(HYBRID))
    assert found.name == "groups"
    assert "bytes a block of" in found.ours


@pytest.mark.parametrize(
    "change",
    [
        {"hash_block_size": 128, "geometry": OTHER_DIGEST},
        {"salt": OTHER_DIGEST},
        {"kv_dtype": "fp8_e4m3", "layers": OTHER_DIGEST},
        {"model_dtype": "float16", "weights": OTHER_DIGEST},
        {"layout": "HND", "geometry": OTHER_DIGEST},
        {"parallel_shape": "tensor 2", "weights": OTHER_DIGEST},
    ],
)
def test_engines_with_the_same_weights_and_another_setting_are_a_pair(change: dict[str, str]) -> None:
    assert differ_by_setting(told(), told(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"revision": OTHER_DIGEST, "salt": OTHER_DIGEST},
        {"revision": ""},
        {"engine": "sglang 0.9", "salt": OTHER_DIGEST},
        {"engine": "vllm 0.33.0 tier", "layout": "HND"},
        {"engine": "vllm 0.34.0"},
        {"weights": OTHER_DIGEST, "salt": OTHER_DIGEST},
        {"model_config": OTHER_DIGEST},
    ],
)
def test_engines_that_differ_in_more_than_a_setting_are_none(change: dict[str, str]) -> None:
    assert not differ_by_setting(told(), told(**change))  # type: ignore[arg-type]
